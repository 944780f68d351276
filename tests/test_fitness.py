"""Each rule fires on the state it is about, and is silent on a good machine."""

import inspect
import re

import pytest
from factory_machine import H200, IDLE, RUNNING, good

from decodegap import fitness, gpus, records
from decodegap.fitness import Needs
from decodegap.paths import HERE

NEEDS = Needs(
    device_memory_mib=20000,
    host_memory_mib=8000,
    host_free_mib=100000,
    disk_mib=64,
    disk_free_mib=60000,
    torch_cuda="13.0",
)


def found(machine, gpu=H200, needs=NEEDS):
    return {(finding.rule, finding.level) for finding in fitness.findings(machine, gpu, needs)}


def test_a_good_machine_has_no_finding():
    assert fitness.findings(good(), H200, NEEDS) == []
    assert fitness.findings(good(), H200) == []


@pytest.mark.parametrize(
    ("changes", "rule", "level"),
    [
        ({"sm_count": 114}, "card", "void"),
        ({"memory_mib": 71885}, "card", "void"),
        ({"device_name": "NVIDIA H200 NVL"}, "card", "void"),
        ({"mig": True}, "mig", "void"),
        ({"capability": "7.5"}, "bf16", "void"),
        ({"idle": IDLE | {"other_processes": 1, "utilisation_percent": 60}}, "neighbour", "void"),
        ({"idle": IDLE | {"other_processes": 1}}, "neighbour", "flag"),
        ({"idle": None, "before": RUNNING | {"other_processes": 1}}, "neighbour", "flag"),
        ({"after": RUNNING | {"other_processes": 1}}, "neighbour", "void"),
        ({key: RUNNING | {"other_processes": None} for key in ("idle", "before", "after")}, "neighbour", "flag"),
        ({"after": RUNNING | {"throttle_reasons": ["hardware slowdown"]}}, "throttle", "void"),
        ({"before": RUNNING | {"throttle_reasons": ["hardware thermal slowdown"]}}, "throttle", "void"),
        ({"before": RUNNING | {"throttle_reasons": ["software thermal slowdown"]}}, "throttle", "void"),
        ({"after": RUNNING | {"throttle_reasons": ["hardware power brake"]}}, "throttle", "void"),
        ({"after": RUNNING | {"throttle_reasons": ["software power cap"]}}, "throttle", "flag"),
        ({"after": RUNNING | {"throttle_reasons": ["application clocks setting"]}}, "throttle", "flag"),
        ({"after": RUNNING | {"throttle_reasons": ["unknown reason 0x200"]}}, "throttle", "flag"),
        ({"after": RUNNING | {"throttle_reasons": ["not reported"]}}, "throttle", "flag"),
        ({"after": RUNNING | {"sm_clock_mhz": 1830}}, "clock", "flag"),
        ({"after": RUNNING | {"memory_clock_mhz": 2619}}, "clock", "flag"),
        ({"power_cap_w": 500.0}, "power cap", "flag"),
        ({"after": RUNNING | {"ecc_uncorrected": 1}}, "ecc", "void"),
        ({"idle": IDLE | {"ecc_uncorrected": 3}}, "ecc", "void"),
        ({"persistence": False}, "persistence", "flag"),
        ({"read_gb_s": 3800.0}, "bandwidth", "flag"),
        ({"read_gb_s": 4900.0}, "bandwidth", "flag"),
        ({"dispatch_us": 31.0}, "dispatch", "flag"),
        ({"dispatch_us_spread": 4.0}, "dispatch", "flag"),
        ({"load_1min": 24.0}, "load", "flag"),
        ({"governor": "powersave"}, "governor", "flag"),
        ({"cpu_quota_cores": 2.0}, "quota", "flag"),
    ],
)
def test_each_fault_of_a_machine_is_found_alone(changes, rule, level):
    assert found(good(**changes)) == {(rule, level)}


@pytest.mark.parametrize(
    ("changes", "rule", "level"),
    [
        ({"device_memory_mib": 150000}, "memory", "flag"),
        ({"host_free_mib": 4000}, "memory", "void"),
        ({"disk_free_mib": 10}, "disk", "void"),
        ({"torch_cuda": ""}, "torch", "void"),
        ({"torch_cuda": "14.1"}, "torch", "void"),
    ],
)
def test_each_unmet_need_is_found_alone(changes, rule, level):
    assert found(good(), needs=Needs(**vars(NEEDS) | changes)) == {(rule, level)}


def in_all(**changes):
    """The same change in every state of a session, as of what stays while it lasts."""
    return {"idle": IDLE | changes, "before": RUNNING | changes, "after": RUNNING | changes}


# Each rule's last good state, the first that it minds, and what it says of that.
BOUNDS = {
    "SMs": ({"sm_count": 132}, {"sm_count": 131}, "card", "void"),
    "memory of the card": ({"memory_mib": 132270}, {"memory_mib": 132269}, "card", "void"),
    "more memory than the card": ({"memory_mib": 155272}, {"memory_mib": 155273}, "card", "void"),
    "name": ({"device_name": "NVIDIA H200"}, {"device_name": "NVIDIA H200 NVL"}, "card", "void"),
    "MIG": ({"mig": False}, {"mig": True}, "mig", "void"),
    "MIG not reported": ({"mig": None}, {"mig": True}, "mig", "void"),
    "bf16": ({"capability": "8.0"}, {"capability": "7.9"}, "bf16", "void"),
    "bf16, by number and not by letter": ({"capability": "10.0"}, {"capability": "7.10"}, "bf16", "void"),
    "a neighbour": ({"idle": IDLE}, {"idle": IDLE | {"other_processes": 1}}, "neighbour", "flag"),
    "a neighbour that works": (
        {"idle": IDLE | {"utilisation_percent": 5}},
        {"idle": IDLE | {"other_processes": 1, "utilisation_percent": 5}},
        "neighbour",
        "void",
    ),
    "a neighbour that comes": (in_all(), {"after": RUNNING | {"other_processes": 1}}, "neighbour", "void"),
    "a neighbour that comes at once": (in_all(), {"before": RUNNING | {"other_processes": 2}}, "neighbour", "void"),
    "processes not listed": (
        {"after": RUNNING | {"other_processes": None}},
        in_all(other_processes=None),
        "neighbour",
        "flag",
    ),
    "power": ({"power_cap_w": 693.0}, {"power_cap_w": 692.0}, "power cap", "flag"),
    "ECC": (in_all(ecc_uncorrected=None), {"before": RUNNING | {"ecc_uncorrected": 1}}, "ecc", "void"),
    "persistence": ({"persistence": None}, {"persistence": False}, "persistence", "flag"),
    "slow reads": ({"read_gb_s": 3840.0}, {"read_gb_s": 3839.0}, "bandwidth", "flag"),
    "reads beyond the peak": ({"read_gb_s": 4800.0}, {"read_gb_s": 4801.0}, "bandwidth", "flag"),
    "dispatch": ({"dispatch_us": 15.0}, {"dispatch_us": 15.1}, "dispatch", "flag"),
    "dispatch that varies": (
        {"dispatch_us": 8.0, "dispatch_us_spread": 2.0},
        {"dispatch_us": 8.0, "dispatch_us_spread": 2.1},
        "dispatch",
        "flag",
    ),
    "load": ({"load_1min": 20.0}, {"load_1min": 20.1}, "load", "flag"),
    "governor": ({"governor": "performance"}, {"governor": "performance/powersave"}, "governor", "flag"),
    "quota": ({"cpu_quota_cores": 16.0}, {"cpu_quota_cores": 15.9}, "quota", "flag"),
    "SM clock": (
        {"before": RUNNING | {"sm_clock_mhz": 2000}, "after": RUNNING | {"sm_clock_mhz": 1901}},
        {"before": RUNNING | {"sm_clock_mhz": 2000}, "after": RUNNING | {"sm_clock_mhz": 1899}},
        "clock",
        "flag",
    ),
    "memory clock": (
        {"before": RUNNING | {"memory_clock_mhz": 3137}},
        {"before": RUNNING | {"memory_clock_mhz": 3136}},
        "clock",
        "flag",
    ),
    "throttled before a session and not in it": (
        {"idle": IDLE | {"throttle_reasons": ["hardware thermal slowdown"]}},
        {"before": RUNNING | {"throttle_reasons": ["hardware thermal slowdown"]}},
        "throttle",
        "void",
    ),
    "idle": (
        {"after": RUNNING | {"throttle_reasons": ["idle"]}},
        {"after": RUNNING | {"throttle_reasons": ["idle", "sync boost"]}},
        "throttle",
        "flag",
    ),
}


@pytest.mark.parametrize(("least", "most", "rule", "level"), BOUNDS.values(), ids=BOUNDS)
def test_each_rule_begins_where_it_says(least, most, rule, level):
    assert found(good(**least)) == set()
    assert found(good(**most)) == {(rule, level)}


@pytest.mark.parametrize(
    ("least", "most", "rule", "level"),
    [
        ({"device_memory_mib": 143767}, {"device_memory_mib": 143768}, "memory", "void"),
        ({"device_memory_mib": 143767}, {"device_memory_mib": 143772}, "memory", "flag"),
        ({"host_free_mib": 8000}, {"host_free_mib": 7999}, "memory", "void"),
        ({"disk_free_mib": 64}, {"disk_free_mib": 63}, "disk", "void"),
        ({"torch_cuda": "13.9"}, {"torch_cuda": "14.0"}, "torch", "void"),
        ({"torch_cuda": None}, {"torch_cuda": ""}, "torch", "void"),
    ],
)
def test_each_need_is_unmet_where_it_says(least, most, rule, level):
    assert found(good(), needs=Needs(**vars(NEEDS) | least)) == set()
    assert found(good(), needs=Needs(**vars(NEEDS) | most)) == {(rule, level)}


def test_memory_held_by_others_counts_beyond_an_idle_cards_own():
    def said(mib):
        return fitness.held_by_others(good(idle=IDLE | {"memory_used_mib": mib}), H200)

    assert (said(1024), said(1025)) == ("", "out of memory while others held 1025 of the card's 143771 MiB")


def test_every_rule_has_a_state_on_either_side():
    """A rule that is added to the gate is added to the bounds, or has none (what a card does not report)."""
    source = inspect.getsource(fitness)
    rules = set(re.findall(r"_(?:void|flag)\(\s*\"([a-z0-9 ]+)\"", source))
    assert rules - {rule for _, _, rule, _ in BOUNDS.values()} == {"memory", "disk", "torch"}


def test_every_recorded_state_is_judged_as_it_was_when_it_was_recorded():
    """The states of real cards that were measured, not only made up ones: what passed passes, what was flagged is."""
    seen = 0
    for manifest in HERE.results.glob("*/MANIFEST.sha256"):
        for record in records.load_shipped(HERE.results, manifest.parent.name):
            if record.machine is not None and record.cell.gpu in gpus.catalogue():
                now = fitness.findings(record.machine, gpus.catalogue()[record.cell.gpu])
                assert {finding.what for finding in now} <= {*record.flags, *record.reasons}
                assert record.outcome == "void" or not [finding for finding in now if finding.level == "void"]
                seen += 1
    assert seen


@pytest.mark.parametrize(
    "changes",
    [
        {"sm_count": 132, "memory_mib": 141000},
        {"idle": IDLE | {"utilisation_percent": 70}},  # the echo of the session before, whose process is gone
        {"after": RUNNING | {"sm_clock_mhz": 345, "memory_clock_mhz": 405, "throttle_reasons": ["idle"]}},
        {"before": RUNNING | {"sm_clock_mhz": 1200}},  # speeding up is no fault
        {"after": RUNNING | {"sm_clock_mhz": 1950}},
        {"power_cap_w": 698.0},
        {"persistence": None, "ecc": None, "power_cap_w": None, "power_cap_default_w": None, "cuda": None},
        {"governor": "performance", "cpu_quota_cores": 16.0, "load_1min": 16.0},
        {"read_gb_s": 4800.0 * 0.81},
        {"read_gb_s": None, "dispatch_us": None, "dispatch_us_spread": None},
    ],
)
def test_what_is_no_fault_is_not_reported(changes):
    assert found(good(**changes)) == set()


def test_memory_that_others_hold_is_not_the_cards_limit():
    taken = good(idle=IDLE | {"memory_used_mib": 130000, "other_processes": 1})
    assert found(taken) == {("memory", "void"), ("neighbour", "flag")}


def test_a_torch_of_an_older_cuda_runs_on_a_newer_driver():
    assert found(good(), needs=Needs(torch_cuda="12.8")) == set()


def test_the_power_cap_that_reading_alone_sets_is_a_flag_and_says_so():
    capped = good(after=RUNNING | {"throttle_reasons": ["software power cap"], "power_w": 700.1})
    (finding,) = fitness.findings(capped, H200)
    assert finding.level == "flag"
    assert "it is how the card works" in finding.do


def test_voids_come_first_and_each_is_one_line_of_what_why_and_do():
    bad = good(persistence=False, mig=True, load_1min=99.0, idle=IDLE | {"ecc_uncorrected": 1})
    listed = fitness.findings(bad, H200)
    assert [finding.level for finding in listed] == ["void", "void", "flag", "flag"]
    for finding in listed:
        assert len(finding.line().splitlines()) == 1
        assert all(
            part in finding.line() for part in (finding.level, finding.rule, finding.what, finding.why, finding.do)
        )


def test_a_cpu_is_judged_as_a_host_only():
    cpu = good(
        **dict.fromkeys(("idle", "before", "after", "sm_count", "capability", "mig", "persistence", "cuda", "driver")),
        **dict.fromkeys(("power_cap_w", "power_cap_default_w", "bus_width_bits", "max_memory_clock_mhz", "ecc")),
        device_name="Some CPU",
        memory_mib=131072,
        read_gb_s=28.0,
        dispatch_us=2.2,
        dispatch_us_spread=0.1,
        load_1min=99.0,
    )
    assert found(cpu, gpu=gpus.CPU, needs=Needs(host_memory_mib=9, host_free_mib=1, torch_cuda="")) == {
        ("memory", "void"),
        ("load", "flag"),
    }
