"""Which card is here: a name alone is not believed, and a card nobody listed still gets a peak of its own."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from decodegap import cli, gpus
from decodegap.errors import BadInputError, WrongGpuError

H200 = gpus.Device(
    index=0,
    uuid="GPU-aaaa",
    name="NVIDIA H200",
    memory_mib=143771,
    sm_count=132,
    capability=(9, 0),
    bus_width_bits=6016,
    memory_clock_mhz=3201,
    mig=False,
)
H100 = replace(H200, uuid="GPU-bbbb", name="NVIDIA H100 80GB HBM3", memory_mib=81559, memory_clock_mhz=2619)
H100_PCIE = replace(H100, uuid="GPU-cccc", name="NVIDIA H100 PCIe", sm_count=114)
T4 = replace(H200, name="Tesla T4", memory_mib=15360, sm_count=40, capability=(7, 5), bus_width_bits=256)
UNKNOWN = replace(H200, name="NVIDIA GeForce RTX 4090", memory_mib=24564, sm_count=128, bus_width_bits=384)


@pytest.mark.parametrize("gpu", gpus.catalogue().values(), ids=lambda gpu: gpu.slug)
def test_each_listed_card_is_recognised_by_what_nvml_says_of_it(gpu):
    device = replace(H200, name=gpu.names[0], memory_mib=gpu.memory_mib, sm_count=gpu.sm_count)
    assert gpus.identify(device) == gpu
    assert gpus.require(gpu.slug, [device]) == (gpu, device)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sm_count": 114}, "it has 114 SMs, the H200 SXM has 132"),
        ({"memory_mib": 71885}, "it has 71885 MiB, the H200 SXM has 143771"),
        ({"name": "NVIDIA H200 NVL"}, "its name is not NVIDIA H200"),
        ({"mig": True}, "MIG mode is on"),
    ],
)
def test_a_card_that_differs_is_not_the_card(change, reason):
    other = replace(H200, **change)
    assert reason in (gpus.mismatch(other, gpus.catalogue()["h200"]) or "")
    assert gpus.identify(other).slug not in gpus.catalogue()
    with pytest.raises(WrongGpuError, match="GPU=h200 cannot be measured here") as caught:
        gpus.require("h200", [other])
    assert "\n" not in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (b"[h100]", b"[h100", "gpus.toml: Expected ']'"),
        (b"L40S", b"\xff", "gpus.toml: 'utf-8' codec can't decode"),
        (b"peak_gb_s = 3350", b"peak_gb_s = 'fast'", "gpus.toml: h100.peak_gb_s: Input should be a valid number"),
        (b"peak_gb_s = 3350", b"peak_gb_s = 0", "gpus.toml: h100.peak_gb_s: Input should be greater than 0"),
        (b"peak_gb_s = 3350", b"peak_gb_s = inf", "gpus.toml: h100.peak_gb_s: Input should be a finite number"),
        (b"sm_count = 132", b"sm_count = 0", "gpus.toml: h100.sm_count: Input should be greater than 0"),
        (b"memory_mib = 81559", b"memory_mib = -1", "gpus.toml: h100.memory_mib: Input should be greater than 0"),
        (b"source = ", b"# source = ", "gpus.toml: h100.source: Field required"),
        (b"peak_gb_s = 3350", b"peak_gbs = 3350", "gpus.toml: h100.peak_gb_s: Field required"),
        (b"sm_count = 132", b"sm_count = 132\nfast = true", "gpus.toml: h100.fast: Extra inputs are not permitted"),
        (b'["NVIDIA L4"]', b'"NVIDIA L4"', "gpus.toml: l4.names: Input should be a valid tuple"),
        (b"[h100]", b"h9000 = 1\n[h100]", "gpus.toml: h9000: Input should be a valid dictionary"),
    ],
)
def test_a_broken_catalogue_is_one_line_that_says_where(tmp_path, monkeypatch, capsys, old, new, named):
    whole = (gpus.DATA / "gpus.toml").read_bytes()
    assert old in whole
    (tmp_path / "gpus.toml").write_bytes(whole.replace(old, new, 1))
    monkeypatch.setattr(gpus, "DATA", tmp_path)
    monkeypatch.setattr(gpus, "catalogue", cache(gpus.catalogue.__wrapped__))
    monkeypatch.setenv("GPU", "h100")
    assert cli.main(["mode"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"decode-gap: {named}")
    assert said.endswith("; git has the one that came with it\n")
    assert said.count("\n") == 1


def test_ecc_and_driver_reservations_do_not_make_another_card():
    assert gpus.identify(replace(H200, memory_mib=int(143771 * 0.95))).slug == "h200"


def test_an_h100_pcie_is_not_an_sxm_and_neither_stands_in_for_the_other():
    assert gpus.identify(H100_PCIE).slug == "h100-pcie"
    with pytest.raises(WrongGpuError, match="NVIDIA H100 PCIe"):
        gpus.require("h100", [H100_PCIE])
    gpu, device = gpus.require("h100", [H100_PCIE, H100])
    assert (gpu.slug, device) == ("h100", H100)


def test_an_unknown_card_gets_a_slug_and_a_derived_peak():
    gpu = gpus.identify(replace(UNKNOWN, memory_clock_mhz=10501))
    assert (gpu.slug, gpu.peak_source, gpu.paper) == ("geforce-rtx-4090", "derived", False)
    assert gpu.peak_gb_s == pytest.approx(2 * 10501e6 * 384 / 8 / 1e9, abs=0.1)
    assert gpus.require("geforce-rtx-4090", [UNKNOWN])[1] == UNKNOWN


def test_the_derived_peak_of_an_h200_agrees_with_its_datasheet():
    derived = gpus.identify(replace(H200, sm_count=131))
    assert derived.peak_source == "derived"
    assert derived.peak_gb_s == pytest.approx(4814.3, abs=0.1)  # 2 x 3201 MHz x 6016 bit / 8
    assert derived.peak_gb_s == pytest.approx(gpus.catalogue()["h200"].peak_gb_s, rel=0.005)


def test_a_card_that_reports_no_clock_has_no_peak_rather_than_zero():
    assert gpus.identify(replace(UNKNOWN, memory_clock_mhz=0)).peak_gb_s is None


@pytest.mark.parametrize("name", ["NVIDIA H100", "NVIDIA L40S 1", "NVIDIA CPU", "NVIDIA auto", "///", "x" * 90])
def test_no_device_name_yields_the_slug_of_something_else(name):
    slug = gpus.identify(replace(H200, name=name)).slug
    assert slug not in {*gpus.catalogue(), "cpu", "auto"}
    assert gpus.check_slug(slug) == slug


def test_a_mig_slice_and_a_card_before_bf16_are_refused_even_as_auto():
    with pytest.raises(WrongGpuError, match="MIG slice is not the card"):
        gpus.require("auto", [replace(H200, mig=True)])
    with pytest.raises(WrongGpuError, match="sm_75; bf16 needs sm_80"):
        gpus.require("auto", [T4])


def test_auto_is_the_first_card_else_the_cpu():
    assert gpus.choose("auto", [H100, H200])[1] == H100
    assert gpus.choose("auto", []) == (gpus.CPU, None)
    assert gpus.require("cpu", [H200]) == (gpus.CPU, None)


def test_a_listed_card_that_is_absent_is_said_to_be_absent():
    assert gpus.choose("l4", []) == (gpus.catalogue()["l4"], None)
    with pytest.raises(WrongGpuError, match="no NVIDIA GPU was found"):
        gpus.require("l4", [])


@pytest.mark.parametrize("slug", ["../x", "a/../b", "a..b", "/etc", "H100", "h 100", "", "-h100", "x" * 65, "h100\n"])
def test_a_slug_that_could_be_a_path_is_refused_in_one_line(slug):
    with pytest.raises(BadInputError, match="is not a name") as caught:
        gpus.choose(slug, [])
    assert len(str(caught.value).splitlines()) == 1


def test_an_unknown_slug_is_refused_with_the_known_ones():
    with pytest.raises(BadInputError, match=r"'h300'.*known are auto, h100, a100") as caught:
        gpus.choose("h300", [H200])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("1,0", [1, 0]),
        (" 0 , 1 ", [0, 1]),
        ("GPU-bbbb", [1]),
        ("GPU-b", [1]),
        ("0,7,1", [0]),  # CUDA ignores everything from the first invalid entry on
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_obeyed(visible, indices):
    devices = [H200, replace(H100, index=1)]
    assert [device.index for device in gpus._visible(devices, visible)] == indices


def test_the_driver_library_is_read_for_real(fake_nvml, h200):
    devices = fake_nvml.ask("gpus.detect()", h200(), h200(uuid="GPU-second", name="NVIDIA L4", cuda_cores=58 * 128))
    assert [(d["name"], d["sm_count"], d["memory_mib"]) for d in devices] == [
        ("NVIDIA H200", 132, 143771),
        ("NVIDIA L4", 58, 143771),
    ]
    assert devices[0] | {"capability": (9, 0), "uuid": "GPU-aaaa"} == vars(H200)
    only = fake_nvml.ask("gpus.detect()", CUDA_VISIBLE_DEVICES="GPU-second")
    assert [d["index"] for d in only] == [1]


def test_mig_and_an_older_core_layout_are_read_from_the_driver(fake_nvml, h200):
    old = h200(uuid="GPU-t4", name="Tesla T4", capability="7.5", cuda_cores=2560, memory_mib=15360)
    seen = fake_nvml.ask("gpus.detect()", h200(mig=1), old)
    assert [d["mig"] for d in seen] == [True, False]
    assert (seen[1]["sm_count"], seen[1]["capability"]) == (40, [7, 5])


def test_a_card_that_reports_next_to_nothing_is_still_listed(fake_nvml, h200):
    bare = {key: h200()[key] for key in ("uuid", "name", "capability")}
    assert fake_nvml.ask("gpus.detect()", bare) == [
        {
            "index": 0,
            "uuid": bare["uuid"],
            "name": "NVIDIA H200",
            "memory_mib": 0,
            "sm_count": 0,
            "capability": [9, 0],
            "bus_width_bits": 0,
            "memory_clock_mhz": 0,
            "mig": False,
        }
    ]


def test_a_card_that_fell_off_the_bus_does_not_hide_the_others(fake_nvml, h200):
    seen = fake_nvml.ask("gpus.detect()", h200(handle="lost"), h200(uuid="GPU-second"))
    assert [d["uuid"] for d in seen] == ["GPU-second"]


def test_without_a_driver_there_are_no_devices(fake_nvml, h200):
    fake_nvml.cards(h200(), driver={"driver_missing": 1})
    assert fake_nvml.ask("gpus.detect()") == []
    if not Path("/proc/driver/nvidia").exists():
        assert fake_nvml.ask("gpus.detect()", LD_LIBRARY_PATH="") == []
