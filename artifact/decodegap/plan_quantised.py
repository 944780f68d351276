"""Which cells the experiment on quantised paths consists of."""

from decodegap import models, plan, quant_catalogue
from decodegap.plan import Request, Task

MODELS = ("qwen2.5-7b",)
CONTEXTS = (2048,)
CPU_MODELS = ("mistral-standin",)  # the smallest; torch's int4 product on a CPU is slow
CPU_CONTEXTS = (128,)
SESSIONS = 3


def quantised(req: Request, gpu: str) -> list[Task]:
    """Every path that `gpu` may run, and the unquantised baselines, for each model and context.

    One check for each model and context comes first, because a path that fails it is not timed; then whole passes over
    the paths, the session index outermost. A path's cell has that path's dtype.
    """
    on_cpu = gpu == "cpu"
    usual = [models.lookup(slug) for slug in (CPU_MODELS if on_cpu else MODELS)]
    chosen = plan.models_of(req, gpu) if req.models else usual
    contexts = req.contexts or (CPU_CONTEXTS if on_cpu else CONTEXTS)
    checks = [plan.cell_of(gpu, "quantised", model, ctx, plan.CHECK) for model in chosen for ctx in contexts]
    cells = [
        plan.cell_of(gpu, "quantised", model, ctx, path.slug, dtype=path.dtype_on(gpu))
        for model in chosen
        for ctx in contexts
        for path in quant_catalogue.on(gpu)
    ]
    return [*plan.tasks_of(req, checks, 1), *plan.tasks_of(req, cells, req.sessions or SESSIONS)]
