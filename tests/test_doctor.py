"""What `make doctor` says of this machine, and of the cards that a driver describes to it."""

import pytest

from decodegap import doctor, gpus
from decodegap.errors import BadInputError


def test_the_doctor_examines_this_cpu(tmp_path):
    lines, code = doctor.doctor("cpu", tmp_path)
    assert code in (0, 1)
    assert lines[-1].startswith(("fit to measure", "not fit"))
    assert any(line.startswith("speed: reads ") for line in lines) == (code == 0)
    assert all(len(line.splitlines()) == 1 for line in lines)


def test_the_doctor_says_which_card_is_missing(tmp_path):
    if gpus.detect():
        pytest.skip("there is a GPU here")
    lines, code = doctor.doctor("h100", tmp_path)
    assert code == 2
    assert lines[-1] == "not fit: it cannot be measured here: no NVIDIA GPU was found (no driver, or none visible)"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BadInputError):
        doctor.doctor("../x", tmp_path)


@pytest.mark.parametrize(
    ("slug", "changes", "code", "said"),
    [
        ("h200", {"cuda_cores": 114 * 128}, 2, "it has 114 SMs, the H200 SXM has 132"),
        ("h200", {"memory_mib": 71885}, 2, "it has 71885 MiB"),
        ("h100", {"name": "NVIDIA H100 PCIe", "memory_mib": 81559, "cuda_cores": 114 * 128}, 2, "is not the H100 SXM"),
        ("h200", {"mig": 1}, 2, "MIG mode is on"),
        ("auto", {"mig": 1}, 1, "void  mig: MIG mode is on"),
        (
            "auto",
            {"name": "Tesla T4", "capability": "7.5", "cuda_cores": 2560},
            1,
            "void  bf16: compute capability 7.5",
        ),
        ("auto", {"name": "NVIDIA Unheard Of", "memory_mib": 48000}, None, "peak 4814.3 GB/s (derived)"),
        ("h200", {"event_reasons": "0x48"}, 1, "void  throttle: hardware thermal slowdown"),
        ("h200", {"used_mib": 90000, "utilisation": 88}, 1, "1 other process(es) on the card, which was 88% busy"),
        ("h200", {"power_cap_mw": 500000}, None, "flag  power cap: the power limit is 500 W, the card's default 700 W"),
        ("h200", {"ecc_uncorrected": 2}, 1, "void  ecc: 2 uncorrected memory error(s)"),
        ("h200", {"persistence": 0}, None, "flag  persistence: persistence mode is off"),
    ],
)
def test_the_doctor_reads_a_cards_state_from_its_driver(fake_nvml, h200, tmp_path, slug, changes, code, said):
    call = f"doctor.doctor({slug!r}, __import__('pathlib').Path(os.environ['STORE']))"
    lines, got = fake_nvml.ask(call, h200(**changes), imports="doctor", STORE=str(tmp_path))
    assert any(said in line for line in lines), lines
    assert code in (None, got)
    assert not any(h200()["uuid"] in line for line in lines)
