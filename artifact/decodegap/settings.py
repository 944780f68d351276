"""What make's settings ask for, and what of it is on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from decodegap import experiment, gpus, plan, records
from decodegap.errors import BadInputError, StoreError, UnsupportedError, WrongGpuError
from decodegap.gpus import Device, Gpu
from decodegap.paths import HERE, imported
from decodegap.plan import Request, Task


@dataclass(frozen=True)
class Context:
    """What every verb starts from: the request, the GPU it means, what is here, and where local records are."""

    request: Request
    devices: list[Device]
    gpu: Gpu
    device: Device | None
    store: Path
    experiments: tuple[str, ...]
    require_measured: bool

    @property
    def measurable(self) -> bool:
        """Whether the GPU asked for is this machine's, so that `reproduce` measures rather than replays."""
        try:
            gpus.require(self.request.gpu, self.devices)
        except (WrongGpuError, BadInputError):  # a card that is not here, or that only records know
            return False
        return True


def context(env: Mapping[str, str]) -> Context:
    """Read and check the settings in `env`; raise `BadInputError` for the first that makes no sense."""
    req = plan.request(
        gpu=env.get("GPU", "") or "auto",
        models=env.get("MODELS", ""),
        contexts=env.get("CONTEXTS", ""),
        sessions=env.get("SESSIONS", ""),
        weights=env.get("WEIGHTS", "") or "synthetic",
    )
    names = tuple(dict.fromkeys(plan.items("EXPERIMENTS", env.get("EXPERIMENTS", "")))) or tuple(experiment.PLANS)
    for name in names:
        if name not in experiment.PLANS:
            raise BadInputError(f"EXPERIMENTS: {name!r} is none of {', '.join(experiment.PLANS)}")
    if env.get("REQUIRE", "") not in ("", "measured"):
        raise BadInputError(f"REQUIRE: {env['REQUIRE']!r}; the only requirement there is, is REQUIRE=measured")
    store = experiment.store(env.get("RESULTS", ""))
    for folder in (HERE.results, store):
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder}: is no folder, and records are kept in one there; move it away")
    devices = gpus.detect()
    gpu, device = gpus.choose(req.gpu, devices, extra=[*_kept(HERE.results), *_kept(store), *_kept(imported(store))])
    return Context(
        request=req,
        devices=devices,
        gpu=gpu,
        device=device,
        store=store,
        experiments=names,
        require_measured=bool(env.get("REQUIRE")),
    )


def _kept(store: Path) -> list[str]:
    """The GPUs that `store` has records of."""
    return [folder.name for folder in store.glob("[!.]*/") if any(records.files(store, folder.name))]


def tasks(ctx: Context) -> list[Task]:
    """Every session of every experiment asked for, in order."""
    return [task for name in ctx.experiments for task in experiment.PLANS[name](ctx.request, ctx.gpu.slug)]


def require_card(ctx: Context) -> None:
    """Raise `UnsupportedError` where kernels have no NVIDIA GPU to be compiled for."""
    if not ctx.devices or ctx.gpu.slug == "cpu":
        found = "GPU=cpu was asked for" if ctx.devices else "none was found (no driver, or none visible)"
        raise UnsupportedError(f"this compiles kernels for an NVIDIA GPU, and {found}")


def here(ctx: Context) -> str:
    """What was found and what GPU= makes of it, in one line."""
    found = ctx.devices[0].describe() if ctx.devices else "no NVIDIA GPU"
    if ctx.measurable:
        what = "the CPU stand-ins" if ctx.gpu.slug == "cpu" else ctx.gpu.label
        return f"found {found}; GPU={ctx.request.gpu} measures {what} here"
    return f"found {found}; GPU={ctx.request.gpu} is not here, so shipped, published and predicted values are shown"
