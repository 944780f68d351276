"""A machine with nothing wrong about it, and the same with some values changed."""

from decodegap import gpus
from decodegap.schema import DeviceState, Machine

H200 = gpus.catalogue()["h200"]
IDLE = {
    "sm_clock_mhz": 345,
    "memory_clock_mhz": 3201,
    "temperature_c": 34,
    "power_w": 76.2,
    "throttle_reasons": ["idle"],
    "memory_used_mib": 4,
    "utilisation_percent": 0,
    "other_processes": 0,
    "ecc_uncorrected": 0,
}
RUNNING = IDLE | {
    "sm_clock_mhz": 1980,
    "power_w": 640.0,
    "throttle_reasons": [],
    "memory_used_mib": 20480,
    "utilisation_percent": 99,
}
GOOD = {
    "device_name": "NVIDIA H200",
    "memory_mib": 143771,
    "sm_count": 132,
    "capability": "9.0",
    "bus_width_bits": 6016,
    "max_memory_clock_mhz": 3201,
    "driver": "580.95.05",
    "cuda": "13.0",
    "ecc": True,
    "mig": False,
    "persistence": True,
    "power_cap_w": 700.0,
    "power_cap_default_w": 700.0,
    "cpu_model": "Some CPU",
    "cores": 16,
    "host_memory_mib": 131072,
    "last_level_cache_mib": 64.0,
    "governor": None,
    "load_1min": 1.2,
    "cpu_quota_cores": None,
    "container": None,
    "host_tag": "00000000",
    "idle": IDLE,
    "before": RUNNING,
    "after": RUNNING,
    "read_gb_s": 4480.0,
    "read_kernel": "torch.mv",
    "read_buffer_mib": 4096,
    "dispatch_us": 8.9,
    "dispatch_us_spread": 0.4,
}


def good(**changes):
    values = GOOD | changes
    states = {key: values[key] and DeviceState(**values[key]) for key in ("idle", "before", "after")}
    return Machine(**values | states)
