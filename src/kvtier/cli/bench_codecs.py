"""`kvtier bench codecs`: every codec on the KV cache of a real model, beside a memory copy in the same run.

The KV is what a model keeps of a text (`--model`, `--text`), or comes from a file that an earlier run saved (`--kv`). It is cut into parts of `--chunk-tokens` tokens, as they are stored. A round runs every codec over all
parts once, one after another, so that a slow minute of the machine hits all alike; figures are medians of the rounds. Speed is raw bytes by time: `gbs` by the clock,
`cpu_gbs` by the seconds of CPU that all threads took. Encoding and decoding include both checksums of the record.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.record.codecs import Codec
    from kvtier.testing.model_kv import KV

NAME = "codecs"
HELP = "ratio, speed and error of every codec on the KV of a real model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a model as Hugging Face keeps it; needs torch and transformers, and --text",
    )
    source.add_argument(
        "--kv",
        type=Path,
        metavar="FILE.npy",
        help="KV that --save wrote: bfloat16 as uint16, (layers, 2, tokens, heads, dim)",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="what the model reads")
    parser.add_argument(
        "--tokens", type=int, default=2048, metavar="N", help="how much of the text it reads (default 2048)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE.npy", help="keep the KV for --kv")
    parser.add_argument("--chunk-tokens", type=int, default=64, metavar="N", help="tokens of a part (default 64)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="also measure with N threads (default 2)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds to take medians of (default 5)")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures to a file")


def kv_from(args: argparse.Namespace) -> "KV":
    """The KV that the arguments ask for. Raises ConfigError."""
    import numpy as np

    if args.model is not None:
        if args.text is None or args.tokens < 1:
            raise ConfigError(
                f"--model needs --text FILE and at least 1 of --tokens, not {args.text} and {args.tokens}"
            )
        from kvtier.testing.model_kv import kv_of_text

        made = kv_of_text(args.model, args.text, args.tokens)
        if args.save is not None:
            np.save(args.save, made)
        return made
    try:
        kv: KV = np.load(args.kv)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--kv {args.kv} cannot be read as a numpy array: {error}") from error
    if kv.dtype != np.uint16 or kv.ndim != 5 or kv.shape[1] != 2:
        raise ConfigError(
            f"--kv {args.kv} holds {kv.dtype} of shape {kv.shape}: bfloat16 as uint16, (layers, 2, tokens, heads, dim), is wanted"
        )
    return kv


def parts_of(kv: "KV", chunk_tokens: int) -> list[memoryview]:
    """KV cut as it is stored, what is left over left out. Raises ConfigError."""
    import numpy as np

    if not 1 <= chunk_tokens <= kv.shape[2]:
        raise ConfigError(f"--chunk-tokens {chunk_tokens} does not fit KV of {kv.shape[2]} tokens")
    starts = range(0, kv.shape[2] // chunk_tokens * chunk_tokens, chunk_tokens)
    return [np.ascontiguousarray(kv[:, :, at : at + chunk_tokens]).data.cast("B") for at in starts]


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds by the clock, seconds of CPU of the process, and what `work` returned."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s, result


def error_of(parts: list[memoryview], decoded: list[memoryview]) -> dict[str, float]:
    """What a lossy codec changed: the largest absolute error, and the root of the mean squares against the data's own."""
    import numpy as np

    from kvtier.record.codec_lossy import to_float

    largest = squares = power = 0.0
    for part, back in zip(parts, decoded, strict=True):
        before = to_float(np.frombuffer(part, "<u2"), "bf16").astype(np.float64)
        error = to_float(np.frombuffer(back, "<u2"), "bf16") - before
        largest = max(largest, float(np.abs(error).max()))
        squares += float((error**2).sum())
        power += float((before**2).sum())
    return {"error_abs_max": largest, "error_rms_relative": (squares / power) ** 0.5}


def candidates(shape: tuple[int, ...], chunk_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Every codec, with the parameters it is measured with."""
    lcnd = {"tokens": chunk_tokens, "heads": shape[3], "head_dim": shape[4]}
    return [
        ("identity", {}),
        ("zstd", {}),
        ("zstd", {"level": 3}),
        ("bf16_split", {}),
        ("bf16_split", {"level": 1}),
        ("ans", {}),
        ("int8", lcnd),
        ("fp8", {}),
    ]


def measure_round(codec: "Codec", parts: list[memoryview], targets: list[memoryview], threads: int) -> dict[str, Any]:
    """One pass of a codec over all parts, both ways."""
    from kvtier.record.codecs import decode_many, encode_many
    from kvtier.record.envelope import Identity

    records = [(Identity(b"bench", number.to_bytes(4, "big")), part) for number, part in enumerate(parts)]
    encode_s, encode_cpu_s, encoded = timed(lambda: encode_many(codec, records, threads))
    triples = [(head, payload, target) for (head, payload), target in zip(encoded, targets, strict=True)]
    decode_s, decode_cpu_s, decoded = timed(lambda: decode_many(triples, threads))
    if not codec.lossy and any(bytes(part) != bytes(back) for part, back in zip(parts, decoded, strict=True)):
        raise AssertionError(f"codec {codec.name} gave back other bytes")
    return {
        "stored_bytes": sum(head.payload_bytes for head, _ in encoded),
        "times_s": (encode_s, encode_cpu_s, decode_s, decode_cpu_s),
        "bound": max((float(head.codec_params.get("error_abs_max", 0)) for head, _ in encoded), default=0.0),
        "decoded": decoded,
    }


def copy_round(parts: list[memoryview], targets: list[memoryview]) -> tuple[float, float]:
    """Seconds of a plain copy of all parts, by the clock and of CPU."""

    def copy() -> None:
        for part, target in zip(parts, targets, strict=True):
            target[:] = part

    wall_s, cpu_s, _ = timed(copy)
    return wall_s, cpu_s


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds; the figures."""
    from kvtier.record.codecs import CodecUnavailableError, make_codec

    if args.rounds < 1 or args.threads < 1:
        raise ConfigError(f"--rounds {args.rounds} and --threads {args.threads} must be at least 1")
    kv = kv_from(args)
    shape, parts = kv.shape, parts_of(kv, args.chunk_tokens)
    raw_bytes = sum(map(len, parts))
    targets = [memoryview(bytearray(len(part))) for part in parts]
    rows: list[dict[str, Any]] = []
    runs: list[tuple[dict[str, Any], Codec, int]] = []
    for name, params in candidates(shape, args.chunk_tokens):
        try:
            codec = make_codec(name, allow_lossy=True, **params)
        except CodecUnavailableError as error:
            rows.append({"codec": name, "params": params, "refused": str(error)})
            continue
        for threads in sorted({1, args.threads}):
            row: dict[str, Any] = {
                "codec": name,
                "params": params,
                "lossy": codec.lossy,
                "threads": threads,
                "times_s": [],
            }
            rows.append(row)
            runs.append((row, codec, threads))
            measure_round(codec, parts[:1], targets[:1], threads)
    copies = []
    for _ in range(args.rounds):
        copies.append(copy_round(parts, targets))
        for row, codec, threads in runs:
            found = measure_round(codec, parts, targets, threads)
            row["times_s"].append(found["times_s"])
            row["ratio"] = round(raw_bytes / found["stored_bytes"], 4)
            if codec.lossy and "error_abs_max" not in row:
                row |= error_of(parts, found["decoded"]) | {"error_bound": found["bound"]}
    gbs = raw_bytes / 1e9
    for row, _, _ in runs:
        medians = [statistics.median(column) for column in zip(*row.pop("times_s"), strict=True)]
        row |= {
            name: float(f"{gbs / max(median_s, 1e-9):.4g}")
            for name, median_s in zip(
                ("encode_gbs", "encode_cpu_gbs", "decode_gbs", "decode_cpu_gbs"), medians, strict=True
            )
        }
    return {
        "kv": {
            "source": f"{args.model.name} reading {args.text.name}" if args.model else args.kv.name,
            "shape": list(shape),
            "raw_bytes": raw_bytes,
            "part_bytes": len(parts[0]),
            "parts": len(parts),
        },
        "rounds": args.rounds,
        "machine": {
            "system": platform.system(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
        },
        "copy_gbs": round(gbs / statistics.median(wall_s for wall_s, _ in copies), 3),
        "codecs": rows,
    }


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    result = measure(args)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    kv = result["kv"]
    print(
        f"{kv['parts']} parts of {kv['part_bytes']:,} bytes; a memory copy runs at {result['copy_gbs']:.2f} GB/s; GB/s of raw bytes, checksums included; load average {result['machine']['load_average']}"
    )
    print(f"{'codec':<12} {'threads':>7} {'ratio':>6} {'encode':>7} {'decode':>7}  {'per CPU second':>15}  error")
    for row in result["codecs"]:
        name = row["codec"] + (f"-{row['params']['level']}" if "level" in row["params"] else "")
        if "refused" in row:
            print(f"{name:<12} refused: {row['refused']}")
            continue
        error = (
            f"at most {row['error_abs_max']:.4g} (bound {row['error_bound']:.4g}), {row['error_rms_relative']:.2%} rms"
            if row["lossy"]
            else "none"
        )
        print(
            f"{name:<12} {row['threads']:>7} {row['ratio']:>6.3f} {row['encode_gbs']:>7.2f} {row['decode_gbs']:>7.2f}  "
            f"{row['encode_cpu_gbs']:>6.2f} / {row['decode_cpu_gbs']:>6.2f}  {error}"
        )
    return 0
