"""Weight deltas against the entropy bounds and against what peers do, on honest snapshots.

    python -m benchmarks.bench_delta [--small] [--quick]

Sizes: both settings at three learning rates, 1 to 8 steps apart. Speeds: bytes of full bf16 weights per CPU second of
one core, in GB/s, and as a share of memcpy of as many bytes; memcpy is measured before, between and after a pair's runs, and
the best of these is what all of them are held against. 1 and 2 threads by wall clock, memcpy's own scaling beside, and
ours over it. Each pair is named with the share of its elements that changed: cost per change is what decides. The weights
(63 MB) do not fit the caches, so every run reads and writes memory; with --small (14 MB) they may. The model has a tensor
for every half million elements, a real one for every ten million or more: what is done for each tensor weighs more here.
Peers: XOR + byte shuffle + zstd-1 and -3, index + value + zstd, gaps + value + zstd, whole zstd-3. Every decoded result is
compared bit by bit.

Beside the speeds of `fast` stand bounds of the same run: the entropy stage alone (zstd's frames of this container, decoded,
or their bytes coded again) and one pass over the weights (both compared; one of them added to in place), as if everything
between cost nothing.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from benchmarks.delta_snapshots import LARGE, LEARNING_RATES, SMALL, STEPS_APART, Snapshot, load_or_train
from echo2.base.ids import Version
from echo2.weights import (
    CodecSetting,
    ContainerDecoder,
    DeltaHeader,
    HostWeights,
    compose,
    encode_delta,
    encode_keyframe,
    fingerprint,
)  # fmt: skip
from echo2.weights.bits import Coder
from echo2.weights.container import BlockFrame, parse_frame

Words = npt.NDArray[np.uint16]
Row = dict[str, object]
REPEATS = 4
THREAD_REPEATS = 8


def flat(snapshot: Snapshot) -> Words:
    """All weights as one array of bit patterns."""
    return np.concatenate([t.view(torch.int16).numpy().view(np.uint16).ravel() for t in snapshot.values()])


def _bits(counts: npt.NDArray[np.int64]) -> float:
    shares = counts[counts > 0].astype(float)
    return float(-(shares * np.log2(shares / shares.sum())).sum())


def entropy_bytes(old: Words, new: Words) -> float:
    """Bytes for positions as independent draws and for steps by their frequencies, over these elements."""
    steps = (new - old)[old != new]
    counts = np.bincount(steps, minlength=1 << 16) if steps.size else np.zeros(1, np.int64)
    return (_bits(np.array([steps.size, old.size - steps.size])) + _bits(counts)) / 8


def conditioned_bytes(old: Words, new: Words) -> float:
    """The same for each exponent of the old weight by itself."""
    exponents = (old >> 7) & 255
    total = 0.0
    for exponent in np.unique(exponents):
        mine = exponents == exponent
        total += entropy_bytes(old[mine], new[mine])
    return total


def _zstd(level: int, data: bytes) -> int:
    return len(zstandard.ZstdCompressor(level=level).compress(data))


def peer_sizes(old: Words, new: Words) -> dict[str, int]:
    """Encoded bytes of what peers do."""
    shuffled = (old ^ new).view(np.uint8).reshape(-1, 2).T.tobytes()
    positions = np.flatnonzero(old != new)
    values = new[positions].tobytes()
    gaps = np.diff(positions, prepend=-1) - 1
    short = np.minimum(gaps, 65535).astype(np.uint16).tobytes() + gaps[gaps >= 65535].astype(np.uint32).tobytes()
    return {
        "xor+shuffle+zstd-1": _zstd(1, shuffled), "xor+shuffle+zstd-3": _zstd(3, shuffled),
        "index+value+zstd-1": _zstd(1, positions.astype(np.int32).tobytes() + values),
        "gaps+value+zstd-1": _zstd(1, short + values), "whole zstd-3": _zstd(3, new.tobytes()),
    }  # fmt: skip


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this thread, the best of a few runs after a first one that warms up."""
    work()
    took = []
    for _ in range(REPEATS):
        start = time.thread_time()
        work()
        took.append(time.thread_time() - start)
    return min(took)


def memcpy_bytes_per_s(count: int) -> float:
    """One core's memcpy of this many bytes."""
    source, target = np.ones(count, np.uint8), np.empty(count, np.uint8)
    return count / cpu_s(lambda: np.copyto(target, source))


def header_for(base: HostWeights, setting: CodecSetting, steps: int) -> DeltaHeader:
    return DeltaHeader(
        target_version=Version((base.version or 0) + steps), parent_version=base.version,
        parent_fingerprint=base.fingerprint(), setting=setting,
    )  # fmt: skip


def decode_and_apply(base: HostWeights, frames: list[bytes]) -> float:
    """CPU seconds from frames to the committed version; `base` ends at it."""
    start = time.thread_time()
    decoder = ContainerDecoder(base)
    for frame in frames:
        decoder.feed(frame)
    base.commit(decoder.finish())
    return time.thread_time() - start


def measure_pair(old: Snapshot, new: Snapshot, setting: CodecSetting, steps: int) -> tuple[list[bytes], float, float]:
    """The frames, CPU seconds to encode, CPU seconds to decode and apply, the best; checks every bit."""
    base = HostWeights.from_tensors(old, Version(0))
    header = header_for(base, setting, steps)
    frames = list(encode_delta(base.tensors(), new, header))
    encode = cpu_s(lambda: list(encode_delta(base.tensors(), new, header)))
    expected = fingerprint(new, 1)
    decode = []
    for _ in range(REPEATS):
        host = HostWeights.from_tensors(old, Version(0))
        host.fingerprint()
        decode.append(decode_and_apply(host, frames))
        assert host.fingerprint(1) == expected, "the decoded weights are not the learner's"
    return frames, encode, min(decode)


def entropy_frames(frames: list[bytes]) -> list[bytes]:
    """zstd's frames in a container's payloads, each behind its plane's coding and length."""
    found = []
    for frame in frames:
        parsed = parse_frame(frame)
        payload = bytes(parsed.payload) if isinstance(parsed, BlockFrame) else b""
        at = payload.find(zstandard.FRAME_HEADER, 5)
        while at >= 0:
            size = int.from_bytes(payload[at - 4 : at], "little")
            is_plane = payload[at - 5] == 1 and at + size <= len(payload)
            if is_plane:
                found.append(payload[at : at + size])
            at = payload.find(zstandard.FRAME_HEADER, at + (size if is_plane else 1))
    return found


def bounds_s(old: Words, new: Words, frames: list[bytes]) -> tuple[float, float]:
    """CPU seconds of the entropy stage alone and one pass over the weights: encoding, decoding and applying."""
    coded, live = entropy_frames(frames), old.copy()
    decompressor, coder = zstandard.ZstdDecompressor(), Coder()
    plain = [decompressor.decompress(each) for each in coded]
    differs = np.empty(1 << 16, np.bool_)

    def compare() -> None:
        for at in range(0, old.size, differs.size):
            part = slice(at, at + differs.size)
            np.not_equal(old[part], new[part], out=differs[: old[part].size])

    encode = cpu_s(lambda: [coder.shorter(each) for each in plain]) + cpu_s(compare)
    decode = cpu_s(lambda: [decompressor.decompress(each) for each in coded]) + cpu_s(lambda: np.add(live, 1, out=live))
    return encode, decode


class Table:
    """Prints rows as they come and keeps them for the results file."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, name: str, value: float, unit: str, target: float | None = None, better: str = "lower") -> None:
        met = "" if target is None else ("ok" if (value <= target) == (better == "lower") else "MISSED")
        print(f"{name:62s} {value:9.4f} {unit:10s} {'' if target is None else f'target {target:g} {met}'}", flush=True)
        self.rows.append({"name": name, "value": value, "unit": unit, "target": target, "better": better})


def bench_rates(table: Table, snapshots: dict[float, dict[int, Snapshot]]) -> None:
    """Sizes and speeds at every learning rate and distance."""
    for rate in LEARNING_RATES:
        for steps in STEPS_APART:
            bench_pair(table, pair_name(rate, steps, snapshots[rate]), snapshots[rate], steps)


def pair_name(rate: float, steps: int, snapshots: dict[int, Snapshot]) -> str:
    """Learning rate, steps apart, and the share of the elements that changed."""
    share = float((flat(snapshots[0]) != flat(snapshots[steps])).mean())
    return f"lr {rate:g} x{steps} ({100 * share:.1f} % changed)"


def bench_pair(table: Table, name: str, snapshots: dict[int, Snapshot], steps: int) -> None:
    """One pair of snapshots: bounds, peers, both settings."""
    old, new = snapshots[0], snapshots[steps]
    a, b = flat(old), flat(new)
    iid, conditioned, peers = entropy_bytes(a, b), conditioned_bytes(a, b), peer_sizes(a, b)
    table.add(f"{name}: bound, iid positions", 100 * iid / a.nbytes, "% of bf16")
    table.add(f"{name}: bound, given exponents", 100 * conditioned / a.nbytes, "% of bf16")
    for peer, size in peers.items():
        table.add(f"{name}: {peer}", 100 * size / a.nbytes, "% of bf16")
    copies, measured = [memcpy_bytes_per_s(a.nbytes)], {}
    for setting in (CodecSetting.DENSE, CodecSetting.FAST):
        measured[setting] = measure_pair(old, new, setting, steps)
        copies.append(memcpy_bytes_per_s(a.nbytes))
    table.add(f"{name}: memcpy, one core", max(copies) / 1e9, "GB/s", None, "higher")
    frames, encode, decode = measured[CodecSetting.DENSE]
    size = sum(map(len, frames))
    table.add(f"{name}: dense", 100 * size / a.nbytes, "% of bf16")
    table.add(f"{name}: dense / bound given exponents", size / conditioned, "x", 1.12)
    table.add(f"{name}: dense / iid bound", size / iid, "x", 0.80)
    table.add(f"{name}: dense / xor+shuffle+zstd-1", size / peers["xor+shuffle+zstd-1"], "x", 0.40)
    # What no code can beat that knows the old exponents and nothing else:
    table.add(f"{name}: bound given exponents / xor", conditioned / peers["xor+shuffle+zstd-1"], "x")
    add_speeds(table, f"{name}: dense", a.nbytes, (encode, decode), max(copies), (0.08, 0.10))
    table.add(f"{name}: dense encode", a.nbytes / encode / 1e9, "GB/s", None, "higher")
    table.add(f"{name}: dense decode+apply", a.nbytes / decode / 1e9, "GB/s", None, "higher")
    frames, encode, decode = measured[CodecSetting.FAST]
    size = sum(map(len, frames))
    table.add(f"{name}: fast", 100 * size / a.nbytes, "% of bf16")
    table.add(f"{name}: fast / iid bound", size / iid, "x", 1.03)
    add_speeds(table, f"{name}: fast", a.nbytes, (encode, decode), max(copies), (0.25, 0.40))
    for what, took in zip(("encode", "decode+apply"), bounds_s(a, b, frames), strict=True):
        table.add(f"{name}: bound of fast {what} / memcpy", a.nbytes / took / max(copies), "x", None, "higher")
    table.add(f"{name}: fast encode", a.nbytes / encode / 1e9, "GB/s", 2.0, "higher")
    table.add(f"{name}: fast decode+apply", a.nbytes / decode / 1e9, "GB/s", 3.0, "higher")


def add_speeds(
    table: Table, name: str, size: int, seconds: tuple[float, float], copy: float, targets: tuple[float, float]
) -> None:
    """Encoding, and decoding and applying, against memcpy."""
    for what, took, target in zip(("encode", "decode+apply"), seconds, targets, strict=True):
        table.add(f"{name} {what} / memcpy", size / took / copy, "x", target, "higher")


def bench_merge(table: Table, snapshots: dict[int, Snapshot]) -> None:
    """Eight versions in a chain against one merged delta, and the keyframe."""
    chain = []
    for step in range(8):
        base = HostWeights.from_tensors(snapshots[step], Version(step))
        chain.append(list(encode_delta(base.tensors(), snapshots[step + 1], header_for(base, CodecSetting.FAST, 1))))
    merged = list(compose(*chain))
    total = sum(len(frame) for container in chain for frame in container)
    table.add("merged over 8 versions / chain", sum(map(len, merged)) / total, "x", 0.55)
    host = HostWeights.from_tensors(snapshots[0], Version(0))
    decode_and_apply(host, merged)
    assert host.fingerprint(1) == fingerprint(snapshots[8], 1), "the merged delta leads elsewhere"
    frames = list(encode_keyframe(snapshots[8], DeltaHeader(target_version=Version(8))))
    raw = sum(t.nbytes for t in snapshots[8].values())
    table.add("keyframe", 100 * sum(map(len, frames)) / raw, "% of bf16", 66.5)
    encode = cpu_s(lambda: list(encode_keyframe(snapshots[8], DeltaHeader(target_version=Version(8)))))
    table.add("keyframe encode", raw / encode / 1e9, "GB/s", None, "higher")
    table.add(
        "keyframe decode+apply", raw / decode_and_apply(HostWeights.empty(), frames) / 1e9, "GB/s", None, "higher"
    )


def best_wall_s(works: dict[int, Callable[[], object]]) -> dict[int, float]:
    """Seconds of each, the best of a few runs in turn after a first one that warms up."""
    took: dict[int, list[float]] = {which: [] for which in works}
    for _ in range(THREAD_REPEATS + 1):
        for which, work in works.items():
            start = time.perf_counter()
            work()
            took[which].append(time.perf_counter() - start)
    return {which: min(times[1:]) for which, times in took.items()}


def in_large_tensors(snapshot: Snapshot) -> Snapshot:
    """Four times the weights, in four tensors of 31 million elements, as threads matter where blocks are many."""
    joined = torch.cat([tensor.flatten() for tensor in snapshot.values()])
    return {f"part{i}": joined.clone() for i in range(4)}


def copy_in_parts(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], executor: ThreadPoolExecutor) -> None:
    """memcpy in as many parts as the codec has blocks."""
    starts = range(0, source.size, 1 << 23)
    list(executor.map(lambda at: np.copyto(target[at : at + (1 << 23)], source[at : at + (1 << 23)]), starts))


def decode_blocks(base: HostWeights, frames: list[bytes], executor: ThreadPoolExecutor) -> None:
    """Decodes and verifies, to be committed (which one thread does)."""
    decoder = ContainerDecoder(base)
    decoder.feed(frames[0])
    list(executor.map(decoder.feed, frames[1:]))
    decoder.finish()


def bench_threads(table: Table, snapshots: dict[int, Snapshot]) -> None:
    """Wall-clock scaling from 1 to 2 threads, of the codec and of memcpy, measured in turn."""
    old, new = in_large_tensors(snapshots[0]), in_large_tensors(snapshots[1])
    source = np.ones(sum(t.nbytes for t in old.values()), np.uint8)
    target = np.empty_like(source)
    base = HostWeights.from_tensors(old, Version(0), copy=False)
    base.fingerprint()
    scaling: dict[str, float] = {}

    def measure(what: str, work: Callable[[ThreadPoolExecutor, int], object]) -> None:
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(2) as two:
            seconds = best_wall_s({1: lambda: work(one, 1), 2: lambda: work(two, 2)})
        scaling[what] = seconds[1] / seconds[2]
        table.add(f"{what}: 2 threads / 1", scaling[what], "x", None, "higher")

    measure("memcpy", lambda executor, _: copy_in_parts(source, target, executor))
    for setting in CodecSetting:
        name, header = setting.name.lower(), header_for(base, setting, 1)
        frames = list(encode_delta(base.tensors(), new, header))

        def encode(executor: ThreadPoolExecutor, threads: int, header: DeltaHeader = header) -> None:
            for _ in encode_delta(base.tensors(), new, header, executor=executor, ahead=2 * threads):
                pass

        def decode(executor: ThreadPoolExecutor, _: int, frames: list[bytes] = frames) -> None:
            decode_blocks(base, frames, executor)

        measure(f"{name} encode", encode)
        measure(f"{name} decode", decode)
    for what, gain in scaling.items():
        if what != "memcpy":
            table.add(f"{what}: 2 threads / 1, over memcpy's", gain / scaling["memcpy"], "x", 1.0, "higher")


def bench_memory(table: Table, name: str, snapshots: dict[int, Snapshot], steps: int) -> None:
    """Peak extra memory, the commit included, in % of the weights; block size chosen for weights as small as these."""
    old, new = snapshots[0], snapshots[steps]
    raw = sum(t.nbytes for t in old.values())
    base = HostWeights.from_tensors(old, Version(0))
    base.fingerprint()
    for setting in CodecSetting:
        header = DeltaHeader(
            target_version=Version(1), parent_version=Version(0), parent_fingerprint=base.fingerprint(),
            setting=setting, block_elements=1 << 18,
        )  # fmt: skip
        frames = list(encode_delta(base.tensors(), new, header))
        host = HostWeights.from_tensors(old, Version(0))
        host.fingerprint()
        tracemalloc.start()
        for _ in encode_delta(base.tensors(), new, header):
            pass
        encoding = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        decode_and_apply(host, frames)
        applying = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        table.add(f"{name}: {setting.name.lower()}: peak extra memory encoding", 100 * encoding / raw, "% of bf16", 10)
        table.add(f"{name}: {setting.name.lower()}: peak extra memory applying", 100 * applying / raw, "% of bf16", 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="7M parameters instead of 30M")
    parser.add_argument("--quick", action="store_true", help="one pair only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    snapshots = load_or_train(SMALL if options.small else LARGE)
    table = Table()
    if options.quick:
        bench_pair(table, pair_name(1e-6, 1, snapshots[1e-6]), snapshots[1e-6], 1)
    else:
        bench_rates(table, snapshots)
    bench_merge(table, snapshots[1e-6])
    bench_threads(table, snapshots[1e-6])
    for rate, steps in ((1e-6, 1), (3e-6, 1), (1e-5, 1), (1e-5, 8)):
        bench_memory(table, pair_name(rate, steps, snapshots[rate]), snapshots[rate], steps)
    results = Path(__file__).parent / "results" / "delta.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(table.rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
