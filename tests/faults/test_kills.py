"""Sessions, runner, writer and kernel are killed at random moments: no record is lost, doubled or half there."""

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from faults import killing, quick_session
from faults.killing import Account, Campaign
from faults.ledger import Ledger

from decodegap import plan, records, runner
from decodegap.paths import HERE

REAL_KILLS, QUICK_KILLS = 40, 160
QUICK_RUN = """
import sys
from pathlib import Path
from decodegap import plan, runner
from decodegap.errors import DecodeGapError
req = plan.request(gpu='cpu', models='tiny-llama,tiny-qwen2', contexts='8,16,24', sessions=3)
try:
    runner.run(plan.baseline(req, 'cpu'), Path(sys.argv[1]), module='faults.quick_session')
except DecodeGapError as error:
    sys.exit(f'decode-gap: {error}')
"""


def environment(**settings: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("GPU", "MODELS", "CONTEXTS", "SESSIONS")}
    path = os.pathsep.join([str(HERE.root / "artifact"), os.environ["PYTHONPATH"]])
    return kept | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | settings


def expected(models: str, contexts: str, sessions: int) -> list[plan.Task]:
    return plan.baseline(plan.request(gpu="cpu", models=models, contexts=contexts, sessions=sessions), "cpu")


def complete(tasks: list[plan.Task], store: Path) -> bool:
    return all(records.path_of(store, task.cell, task.session).exists() for task in tasks)


SILENT = {
    "session": "nothing: the same run measures it again, and names it at the end if it dies three times",
    "writer": "nothing: the same run measures it again, and names it at the end if it dies three times",
    "runner": "nothing more, it is gone: the next run measures what is missing",
    "kernel": "nothing",
}


def note(faults: Ledger, what: str, account: Account) -> None:
    names = {
        "session": "a session",
        "writer": "a session as it writes",
        "runner": "the runner",
        "kernel": "papermill's kernel",
    }
    for (kind, sent), times in sorted(account.kills.items()):
        heard = account.said.get((kind, sent), "") if kind in ("runner", "kernel") else ""
        faults.note(f"{sent} of {names[kind]}{what}", heard or SILENT[kind], injected=times)
    faults.rows[-1].lost += len(account.lost)
    faults.rows[-1].wrong += len(account.wrong)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_of_real_sessions_their_kernel_and_papermill(
    tmp_path: Path, dice: random.Random, kills: int, faults: Ledger
) -> None:
    store = tmp_path / "store"
    models, contexts, sessions = "tiny-qwen2,tiny-llama,tiny-mistral" if kills >= 100 else "tiny-llama", "24,32", 1
    plan_of = {"GPU": "cpu", "MODELS": models, "CONTEXTS": contexts, "SESSIONS": str(sessions)}
    tasks = expected(models, contexts, sessions)
    campaign = Campaign(
        command=[sys.executable, "-m", "decodegap", "measure"],
        env=environment(EXPERIMENTS="baseline", RESULTS=str(store), **plan_of),
        store=store,
        targets={"session": 0.6, "kernel": 0.2, "runner": 0.2},
        marks={"session": "decodegap.session", "kernel": "ipykernel_launcher"},
        horizon_s=6.0,
    )
    account = Account()
    wanted = -(-REAL_KILLS * kills // 100)
    killing.ravage(campaign, wanted, dice, account, lambda: complete(tasks, store), lambda: shutil.rmtree(store))
    note(faults, " (real sessions)", account)
    found = records.load_all(store, "cpu")
    assert account.total >= wanted
    assert (account.lost, account.wrong) == ([], [])
    assert sorted((r.cell.file_name(r.session)) for r in found) == sorted(t.cell.file_name(t.session) for t in tasks)
    assert all(runner.valid_record(task, store) for task in tasks)
    assert len({tuple(killing.samples(path)) for path in records.files(store, "cpu")}) == len(tasks)
    assert not list(Path(tempfile.gettempdir()).glob("decode-gap-*/")), "the last run swept what the killed ones left"
    assert not list(store.rglob("*.partial"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_of_runner_and_writer(tmp_path: Path, dice: random.Random, kills: int, faults: Ledger) -> None:
    store = tmp_path / "store"
    tasks = expected("tiny-llama,tiny-qwen2", "8,16,24", 3)
    campaign = Campaign(
        command=[sys.executable, "-c", QUICK_RUN, str(store)],
        env=environment(),
        store=store,
        targets={"session": 0.4, "writer": 0.3, "runner": 0.3},
        marks={"session": "faults.quick_session"},
        horizon_s=1.0,
    )
    account = Account()
    wanted = -(-QUICK_KILLS * kills // 100)
    killing.ravage(campaign, wanted, dice, account, lambda: complete(tasks, store), lambda: shutil.rmtree(store))
    note(faults, " (all but the model)", account)
    print(f"{account.total} kills, {account.half_written} of them in the middle of writing a record")
    for task in tasks:
        written = records.load(records.path_of(store, task.cell, task.session))
        assert written.model_copy(update={"content_hash": ""}) == quick_session.made(task)
    assert len(records.load_all(store, "cpu")) == len(tasks)
    assert account.total >= wanted
    assert (account.lost, account.wrong) == ([], [])
    assert not list(store.rglob("*.partial"))
