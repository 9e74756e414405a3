"""Memory limits of mlx and Metal while models are loaded and unloaded."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.engine.device import (
    MARGIN,
    POOL,
    UNWIRE_SECONDS,
    DeviceLock,
    MemoryLimits,
    Metal,
)
from vllm_mlx_harmony.engine.memory import layout_of

GB, GIB = 10**9, 1 << 30
BEFORE = (0, 150 * GB, 151 * GB)
RECOMMENDED = 100 * GB


def gpt_oss(layers: int) -> dict[str, object]:
    """The fields of a config that determine the size of keys and values."""
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return {
        "layer_types": kinds,
        "sliding_window": 128,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }


MODELS = {"20b": (12_100_000_000, gpt_oss(24)), "120b": (63_400_000_000, gpt_oss(36))}

MACS = [
    # GiB of memory, share that macOS recommends, model, ids that fit beside the prefix cache
    (16, 2 / 3, "20b", 0),
    (24, 2 / 3, "20b", 50_000),
    (32, 2 / 3, "20b", 131_072),
    (48, 3 / 4, "20b", 131_072),
    (64, 3 / 4, "20b", 131_072),
    (64, 3 / 4, "120b", 0),
    (96, 3 / 4, "20b", 131_072),
    (96, 3 / 4, "120b", 0),
    (128, 3 / 4, "20b", 131_072),
    (128, 3 / 4, "120b", 131_072),
]


@pytest.mark.parametrize(("gib", "part", "model", "ids"), MACS)
def test_memory_limits_fit_macs(gib: int, part: float, model: str, ids: int) -> None:
    """The defaults: a sixteenth of memory for the prefix cache, 0.9 of what macOS recommends for
    everything."""
    recommended, cache = int(gib * GIB * part), gib * GIB // 16
    weights, config = MODELS[model]
    limits = MemoryLimits.of(recommended, weights, cache, 0.9)
    fits = (gib, model) not in {(16, "20b"), (64, "120b")}
    assert (weights < limits.usable) is fits
    assert limits.usable + limits.pool <= recommended
    assert limits.wired <= recommended
    if not fits:
        assert limits.cache == 0
        return
    layout = layout_of(config)
    assert layout is not None
    # Usable memory includes the prefix cache and evicted pieces that are not written yet.
    assert weights + limits.cache + (layout.nbytes(ids) if ids else 0) <= limits.usable
    assert weights + limits.cache < limits.wired
    assert weights + layout.nbytes(131_072) <= limits.usable, "a whole context fits, if need be"
    if model == "20b" and gib >= 32:
        assert limits.wired < 0.8 * recommended, "not all that could be wired is"


def test_cache_is_clamped_to_usable_memory() -> None:
    limits = MemoryLimits.of(100, weight_bytes=95, cache=50, utilization=1.0)
    assert limits == MemoryLimits(100, usable=100, cache=5, wired=100, pool=POOL)


@dataclass
class Device:
    """Metal as mlx exposes it."""

    wired: int = BEFORE[0]
    memory: int = BEFORE[1]
    pool: int = BEFORE[2]
    now: float = 1000.0
    set: list[str] = field(default_factory=list)

    @property
    def limits(self) -> tuple[int, int, int]:
        return self.wired, self.memory, self.pool

    def monotonic(self) -> float:
        return self.now

    def change(self, name: str, value: int) -> int:
        assert name != "wired" or value <= RECOMMENDED, "mlx raises"
        before = int(getattr(self, name))
        setattr(self, name, value)
        self.set.append(name)
        return before


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(device, "has_metal", lambda: True)
    monkeypatch.setattr(device, "memory", lambda: RECOMMENDED)
    monkeypatch.setattr(device, "time", fake)
    monkeypatch.setattr(mx, "set_wired_limit", lambda value: fake.change("wired", value))
    monkeypatch.setattr(mx, "set_memory_limit", lambda value: fake.change("memory", value))
    monkeypatch.setattr(mx, "set_cache_limit", lambda value: fake.change("pool", value))
    return fake


@pytest.mark.parametrize(
    "changes",
    [
        (5, -5),
        (5, 9, -5, -9),
        (5, 9, -9, 3, -5, -3),
        (0, 5, 0, -5, 0),
        (5, -5, 9, -9),
        (90, 30, -90, -30),
    ],
)
def test_limits_follow_weights(metal: Device, changes: tuple[int, ...]) -> None:
    models = Metal()
    for at, change in enumerate(changes):
        models.add_weights(change * GB, 2 * GB, 0.9)
        weights = sum(changes[: at + 1]) * GB
        assert models.weight_bytes() == weights
        limits = MemoryLimits.of(RECOMMENDED, weights, 2 * GB, 0.9)
        expected = (limits.wired, RECOMMENDED, limits.pool)
        assert metal.limits == (expected if weights else BEFORE)


@pytest.mark.parametrize(
    ("value", "wired"),
    [
        (None, 10 * GB + 2 * GB + MARGIN),
        (0, 0),
        (20 * GIB, 20 * GIB),
        (500 * GIB, RECOMMENDED),
    ],
)
def test_setting_limits_wired_memory(metal: Device, value: int | None, wired: int) -> None:
    models = Metal()
    models.add_weights(10 * GB, 2 * GB, 0.9, value)
    assert metal.wired == wired
    metal.now += UNWIRE_SECONDS
    assert models.unwire_when_idle() is None
    models.keep_wired()
    assert metal.wired == wired


def test_wired_memory_is_released_after_idle_time(metal: Device) -> None:
    models = Metal()
    assert models.unwire_when_idle() is None, "nothing is loaded"
    models.add_weights(10 * GB, 2 * GB, 0.9)
    wired = metal.wired
    metal.now += UNWIRE_SECONDS - 100
    assert models.unwire_when_idle() == 100
    models.keep_wired()
    assert models.unwire_when_idle() == UNWIRE_SECONDS
    metal.now += UNWIRE_SECONDS
    assert metal.wired == wired, "as long as nobody asks"
    assert models.unwire_when_idle() is None and metal.wired == BEFORE[0]
    assert models.unwire_when_idle() is None
    metal.set.clear()
    for _ in range(3):
        models.keep_wired()
    assert metal.wired == wired and metal.set == ["wired"]
    assert models.unwire_when_idle() == UNWIRE_SECONDS
    metal.now += UNWIRE_SECONDS
    assert models.unwire_when_idle() is None
    models.add_weights(5 * GB, 2 * GB, 0.9)
    assert metal.wired == wired + 5 * GB, "a model that is loaded is about to compute"
    models.add_weights(-15 * GB)
    assert metal.limits == BEFORE
    models.keep_wired()
    assert metal.limits == BEFORE and models.unwire_when_idle() is None


def test_no_limits_are_set_without_metal(metal: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_metal", lambda: False)
    models = Metal()
    models.add_weights(10 * GB, 2 * GB, 0.9)
    models.keep_wired()
    assert models.unwire_when_idle() is None
    models.add_weights(-10 * GB)
    assert metal.set == []


def test_measurement_waits_for_running_work_and_runs_alone() -> None:
    settled, order = list[str](), list[str]()
    lock = DeviceLock(lambda: settled.append(threading.current_thread().name))
    started, go = threading.Event(), threading.Event()

    def compute() -> None:
        lock.share("first")
        started.set()
        go.wait(10)
        lock.share("first")
        order.append("computed")
        lock.release("first")

    def measure() -> None:
        with lock.exclusive():
            order.append("measures")
            time.sleep(0.05)
            order.append("has measured")

    first = threading.Thread(target=compute, name="first")
    second = threading.Thread(target=measure, name="second")
    first.start()
    assert started.wait(10)
    second.start()
    time.sleep(0.05)
    assert order == [] and settled == [], "the first one computes"
    go.set()
    for thread in (first, second):
        thread.join(10)
    assert order == ["measures", "has measured", "computed"]
    assert settled == ["first", "first"]
    lock.release("first")
    assert settled == ["first", "first"], "it has nothing to wait for"


def test_failed_engine_blocks_nobody() -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    lock = DeviceLock(fail)
    lock.share("first")
    with pytest.raises(RuntimeError):
        lock.release("first")
    with pytest.raises(ZeroDivisionError), lock.exclusive():
        raise ZeroDivisionError
    lock.share("second")
    assert lock._shared == {"second"}
