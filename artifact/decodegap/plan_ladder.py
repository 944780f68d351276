"""Which sessions the ladder consists of: groups of rungs, each group measured in one process, one rung after another.

A rung is an arm of one cell. Rungs of a session share weights, host and clocks, and what starting a process costs is
paid once. The compiled rung has sessions of its own because compiling takes half a minute, and the int4 rung because
its reference is another one: the same network with its weights rounded to four bits.
"""

from decodegap import models, plan
from decodegap.plan import Request, Task
from decodegap.schema import Experiment

EXPERIMENT: Experiment = "ladder"
FUSED = ("fused-plain", "fused")  # one load of the weights serves both
INT4 = "fused-int4"
OWN = (*FUSED, INT4)  # the rungs of our own fused step
RUNGS = ("eager", "eager-pinned", "graph", "graph-static", "compiled", *OWN)  # from the lowest to the highest
GROUPS: dict[str, tuple[str, ...]] = {
    "rungs": ("eager", "eager-pinned", "graph", "graph-static", *FUSED),
    "int4": (INT4,),
    "compiled": ("compiled",),
}
CPU_GROUPS: dict[str, tuple[str, ...]] = {"rungs": ("eager", "eager-pinned", "compiled", *OWN)}
CONTEXTS = {"qwen2.5-7b": (2048, 16384), "llama-3.1-8b": (2048, 16384), "mistral-7b-v0.3": (2048,)}
INT4_CONTEXTS = {
    "qwen2.5-7b": (2048,)
}  # where it is claimed; of a cell whose model and context are both named, it is planned too
SESSIONS = 3
CPU_SESSIONS = 1  # a CPU has three rungs and none of our own: enough to see the experiment work


def ladder(req: Request, gpu: str) -> list[Task]:
    """The ladder on `gpu`: every pass of the common rungs first, then those of the int4 and of the compiled rung.

    Within each of the three the session index is outermost.
    """
    on_cpu = gpu == "cpu"
    chosen = [models.lookup(slug) for slug in req.models or (plan.CPU_GRAPH_MODELS if on_cpu else CONTEXTS)]
    usual = plan.CPU_CONTEXTS[:1] if on_cpu else plan.GRAPH_CONTEXTS
    wanted = [(model, ctx) for model in chosen for ctx in req.contexts or CONTEXTS.get(model.slug, usual)]
    sessions = req.sessions or (CPU_SESSIONS if on_cpu else SESSIONS)
    tasks = []
    for group, arms in groups(gpu).items():
        usual_only = INT4 in arms and not on_cpu and not (req.models and req.contexts)
        here = [(m, ctx) for m, ctx in wanted if not usual_only or ctx in INT4_CONTEXTS.get(m.slug, ())]
        tasks += plan.tasks_of(req, [plan.cell_of(gpu, EXPERIMENT, m, ctx, group) for m, ctx in here], sessions)
    return tasks


def groups(gpu: str) -> dict[str, tuple[str, ...]]:
    """The rungs of each group on this kind of device, by the arm of the group's cell."""
    return CPU_GROUPS if gpu == "cpu" else GROUPS


def order(names: tuple[str, ...], session: int) -> tuple[str, ...]:
    """The order in which a session measures `names`: turned by one rung from session to session.

    So no rung always comes after the same one, on a card that it has warmed. The fused rungs stay behind the others,
    because loading them takes the weights out of the network, and take turns among themselves.
    """
    plain = tuple(name for name in names if name not in OWN)
    own = tuple(name for name in names if name in OWN)
    return (*_turned(plain, session), *_turned(own, session))


def _turned(names: tuple[str, ...], session: int) -> tuple[str, ...]:
    by = (session - 1) % len(names) if names else 0
    return names[by:] + names[:by]
