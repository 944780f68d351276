"""What a record says of its machine: true, survives silence, and names nobody."""

import getpass
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from decodegap import host, machine
from decodegap.schema import DeviceState, Machine

UNPROBED = dict.fromkeys(
    ("before", "after", "read_gb_s", "read_kernel", "read_buffer_mib", "dispatch_us", "dispatch_us_spread")
)
STATE = "machine.state(gpus.detect()[0])"


def state(fake_nvml, *cards, **env):
    return fake_nvml.ask(f"{STATE}.model_dump()", *cards, **env)


def test_this_cpu_fills_a_record(tmp_path):
    seen = Machine(**machine.describe(None, tmp_path), **UNPROBED)
    assert seen.device_name == seen.cpu_model
    assert seen.cores == len(os.sched_getaffinity(0))
    assert seen.host_memory_mib == psutil.virtual_memory().total // 2**20
    assert machine.state(None) is None
    assert machine.energy_mj(None) is None


def test_a_card_fills_a_record(fake_nvml, h200, tmp_path):
    call = "machine.describe(gpus.detect()[0], __import__('pathlib').Path(os.environ['STORE']))"
    facts = fake_nvml.ask(call, h200(), STORE=str(tmp_path))
    seen = Machine(**facts, **UNPROBED)
    assert (seen.device_name, seen.memory_mib, seen.sm_count, seen.capability) == ("NVIDIA H200", 143771, 132, "9.0")
    assert (seen.driver, seen.cuda, seen.ecc, seen.mig, seen.persistence) == ("580.95.05", "13.1", True, False, True)
    assert (seen.power_cap_w, seen.power_cap_default_w) == (700.0, 700.0)
    assert (seen.bus_width_bits, seen.max_memory_clock_mhz) == (6016, 3201)


def test_the_state_of_a_card_is_what_it_reports(fake_nvml, h200):
    card = h200(event_reasons="0x4", sm_clock=1830, power_mw=699700, utilisation=98, ecc_uncorrected=2)
    assert state(fake_nvml, card) == {
        "sm_clock_mhz": 1830,
        "memory_clock_mhz": 3201,
        "temperature_c": 34,
        "power_w": 699.7,
        "throttle_reasons": ["software power cap"],
        "memory_used_mib": 4,
        "utilisation_percent": 98,
        "other_processes": 0,
        "ecc_uncorrected": 2,
    }


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        ("0x0", []),
        ("0x1", ["idle"]),
        ("0x68", ["hardware slowdown", "software thermal slowdown", "hardware thermal slowdown"]),
        ("0x80", ["hardware power brake"]),
        ("0x1000", ["unknown reason 0x1000"]),
    ],
)
def test_event_reasons_have_readable_names(fake_nvml, h200, bits, names):
    assert state(fake_nvml, h200(event_reasons=bits))["throttle_reasons"] == names


def test_an_older_driver_gives_reasons_and_memory_under_older_names(fake_nvml, h200):
    seen = state(fake_nvml, h200(event_reasons=None, throttle_reasons="0x40", memory_v2_missing=1, reserved_mib=0))
    assert seen["throttle_reasons"] == ["hardware thermal slowdown"]
    assert seen["memory_used_mib"] == 4


def test_a_card_that_reports_next_to_nothing_gives_none_and_no_error(fake_nvml, h200, tmp_path):
    bare = {key: h200()[key] for key in ("uuid", "name", "capability")}
    assert state(fake_nvml, bare | {"processes_missing": 1}) == {
        **dict.fromkeys(DeviceState.model_fields),
        "throttle_reasons": ["not reported"],
    }
    call = "machine.describe(gpus.detect()[0], __import__('pathlib').Path(os.environ['STORE']))"
    fake_nvml.cards(bare, driver={})
    seen = Machine(**fake_nvml.ask(call, STORE=str(tmp_path)), **UNPROBED)
    assert (seen.driver, seen.cuda, seen.ecc, seen.power_cap_w, seen.sm_count) == (None,) * 5
    assert fake_nvml.ask("machine.energy_mj(gpus.detect()[0])") is None


def test_a_card_that_is_lost_while_measured_gives_none_and_no_error(fake_nvml, h200):
    fake_nvml.cards(h200())
    lost = dict.fromkeys(h200(), "lost") | {"memory_mib": 143771, "processes_missing": 1}
    code = (
        "import json, os, pathlib\nfrom decodegap import gpus, machine\n"
        "device = gpus.detect()[0]\nmachine.state(device)\n"
        f"path = pathlib.Path(os.environ['FAKE_NVML'])\npath.write_text({_text(lost)!r})\n"
        "print(json.dumps([machine.state(device).sm_clock_mhz, machine.energy_mj(device)]))\n"
    )
    done = fake_nvml.run("-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None, None]


def _text(card):
    return "\n".join(["[gpu]", *(f"{key} = {value}" for key, value in card.items())]) + "\n"


def test_the_card_asked_about_is_the_one_chosen(fake_nvml, h200):
    fake_nvml.cards(h200(sm_clock=1000), h200(uuid="GPU-second", sm_clock=2000, energy_mj=77))
    asked = "[machine.state(d).sm_clock_mhz for d in gpus.detect()] + [machine.energy_mj(gpus.detect()[1])]"
    assert fake_nvml.ask(asked) == [1000, 2000, 77]


def test_the_state_is_quick_to_read(fake_nvml, h200):
    fake_nvml.cards(h200(process=["self 500", "1 300"]))
    timed = (
        "(lambda d, clock: (machine.state(d), clock(), machine.state(d), clock()))"
        "(gpus.detect()[0], __import__('time').perf_counter)"
    )
    _, start, _, end = fake_nvml.ask(f"[x if isinstance(x, float) else 0 for x in {timed}]")
    assert end - start < 0.02


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({}, 0),
        ({"process": "self 500", "used_mib": 504}, 0),
        ({"process": ["{stranger} 300"], "used_mib": 304}, 1),
        ({"process": ["self 500", "{stranger} 300", "4000000 200"], "used_mib": 1004}, 2),
        ({"process": ["{parent} 300"], "used_mib": 304}, 0),
        ({"used_mib": 200}, 0),  # an idle card's own
        ({"used_mib": 201}, 1),
        ({"process": ["{stranger} 300"], "used_mib": 500}, 1),
        ({"process": ["{stranger} 300"], "used_mib": 501}, 2),
        ({"used_mib": 20000}, 1),  # nobody listed, yet the memory is taken: a container hides its owner
        ({"process": ["{stranger} 300"], "used_mib": 20000}, 2),
        ({"processes_missing": 1, "used_mib": 200}, None),
        ({"processes_missing": 1, "used_mib": 201}, 1),
        ({"processes_missing": 1, "used_mib": 20000}, 1),
    ],
)
def test_neighbours_are_counted_and_family_is_not(fake_nvml, h200, changes, others):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        names = {"parent": os.getpid(), "stranger": stranger.pid}
        known = changes.get("process", [])
        lines = [line.format(**names) for line in ([known] if isinstance(known, str) else known)]
        assert state(fake_nvml, h200(**changes | {"process": lines}))["other_processes"] == others
        stranger.kill()


def test_a_child_of_this_process_is_no_neighbour(fake_nvml, h200):
    fake_nvml.cards(h200())
    code = (
        "import os, pathlib, subprocess, sys\nfrom decodegap import gpus, machine\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "path = pathlib.Path(os.environ['FAKE_NVML'])\n"
        "path.write_text(path.read_text() + f'process = {child.pid} 400\\nused_mib = 404\\n')\n"
        "print(machine.state(gpus.detect()[0]).other_processes)\nchild.kill()\nchild.wait()\n"
    )
    done = fake_nvml.run("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_nothing_in_a_description_names_the_host_or_its_user(fake_nvml, h200, tmp_path):
    card = h200()
    call = (
        "[machine.describe(d, __import__('pathlib').Path(os.environ['STORE'])) for d in (gpus.detect()[0], None)]"
        f" + [{STATE}.model_dump()]"
    )
    text = json.dumps(fake_nvml.ask(call, card, STORE=str(tmp_path)))
    secrets = {
        card["uuid"],
        card["uuid"].removeprefix("GPU-"),
        str(tmp_path),
        str(Path.home()),
        host._machine_id(Path("/")),
    }
    secrets |= {socket.gethostname(), platform.node()}
    addresses = {a.address for group in psutil.net_if_addrs().values() for a in group}
    for secret in (secrets | addresses) - {"", "localhost"}:
        assert secret not in text
    words = {word.lower() for word in text.replace('"', " ").split()}
    assert getpass.getuser().lower() not in words
    assert '"/' not in text
