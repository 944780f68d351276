"""Does each quantised path work on this card? `python -m decodegap.quant_smoke`: one line a path, well under a minute.

On a cut-down Qwen: errors of each kind of projection, kernels by name and number, a graph and whether it is stale.
"""

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import torch

from decodegap import arms, attest, decode, graphs, models, quant_attest, quant_bench, quant_catalogue, quant_paths
from decodegap.arms import Setup
from decodegap.errors import DecodeGapError
from decodegap.quant_catalogue import PATHS, QuantPath

LAYERS, VOCAB, CTX, CHUNK = 2, 4096, 96, 64
# A relative error above this is a wrong weight, not rounding: the worst path here adds up in fp16, a few times 1e-3.
WRONG = 0.02
LOST = 3  # the exit code of a process whose CUDA context is gone


def examine(path: QuantPath, model: models.Model, device: str) -> tuple[list[str], str]:
    """What is wrong with `path` here, in words, and what was seen of it in a line.

    Raises `UnsupportedError` where it cannot run.
    """
    quant_paths.require(path, device)
    net = quant_bench.built(model, path, device, None)
    tokens = decode.prompt(model.config["vocab_size"], CTX, 1, device)
    cache, logits = decode.prefill(net, tokens, CHUNK)
    setup = Setup(net, cache, logits.argmax(dim=-1, keepdim=True), CTX, device)
    layers = model.config["num_hidden_layers"]
    held = quant_paths.convert(net, path, device)
    rows = quant_bench.projections(net, path, device)
    faults = [f"{row.kind} is off by {row.error:.2g}" for row in rows if not row.error < WRONG]
    with decode.backends(arms.SDPA_BACKENDS["flash"]):
        if device.startswith("cuda"):
            quant_attest.require_capture(net)
            body = graphs.pinned(setup)
            launched, captured = graphs.launched(setup, body), graphs.captured(setup, body)
            faults += quant_attest.replay_faults(path, launched, captured, device, layers)
        else:
            launched = arms.prepare("eager", setup)
        kernels = attest.kernels(launched, device)
        faults += quant_paths.faults(path, kernels, layers)
    if faults:
        faults.append("it ran " + ", ".join(f"{name[:60]} {n}x" for name, n in kernels.most_common(6)))
    parts = [
        f"{row.kind} {row.us:.1f} us {row.gb_s:.0f} GB/s error {row.error:.1e} ({row.dense_error:.1e})" for row in rows
    ]
    return faults, f"{held.packed / 1e6:.1f} MB packed; " + "; ".join(parts)


def lines(slugs: Sequence[str], device: str, say: Callable[[str], None]) -> int:
    """Say one line a path; the exit code: 1 if one that runs here is wrong, `LOST` if the device stopped answering."""
    model = models.lookup("qwen2.5-7b" if device.startswith("cuda") else "qwen2-standin")
    model = replace(model, config=model.config | {"num_hidden_layers": LAYERS, "vocab_size": VOCAB})
    wrong = 0
    for slug in slugs:
        began = monotonic()
        try:
            with torch.inference_mode():
                faults, seen = examine(PATHS[slug], model, device)
            verdict = f"FAIL: {'; '.join(faults)}; {seen}" if faults else f"ok: {seen}"
        except DecodeGapError as error:
            faults, verdict = [], f"unsupported: {error}"
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            faults, verdict = ["stopped"], f"FAIL: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        wrong = wrong or int(bool(faults))
        say(f"{slug:<15} {verdict} [{monotonic() - began:.1f} s]")
        gc.collect()
        try:
            decode.synchronize(device)
        except RuntimeError:
            return LOST
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Go through the paths of this machine; those after one that takes the device along, in a process of their own.

    The exit code: 1 if one that runs here is wrong or was stopped, 2 for a name that is no path's.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = [path.slug for path in quant_catalogue.on("gpu" if device == "cuda" else "cpu")]
    parser = argparse.ArgumentParser(prog="python -m decodegap.quant_smoke", description=__doc__)
    parser.add_argument("paths", nargs="*", default=here, help=f"of {', '.join(PATHS)}")
    chosen = list(parser.parse_args(arguments).paths)
    if unknown := [slug for slug in chosen if slug not in PATHS]:
        print(f"decode-gap: no path is called {unknown[0][:60]!r}; known are {', '.join(PATHS)}", file=sys.stderr)
        return 2
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        print(line, flush=True)

    code = lines(chosen, device, say)
    rest = chosen[len(said) :]
    if code == LOST and rest:
        subprocess.run([sys.executable, "-m", "decodegap.quant_smoke", *rest], check=False)
    return min(code, 1)


if __name__ == "__main__":
    raise SystemExit(main())
