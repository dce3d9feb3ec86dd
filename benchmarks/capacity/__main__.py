"""How large a cluster must be: replicas, Redis, and what monolithic engines would need for the same traffic.

python -m benchmarks.capacity --requests 1000 --hit-rate 0.8 --tower pixtral-12b --gpu h100
python -m benchmarks.capacity --table --tower pixtral-12b     10 to 100,000 requests a second

Service times follow from the models' sizes, the device's data sheet and the assumptions, each of which is an option.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from benchmarks.capacity.hardware import DEVICES, LANGUAGES, TOWERS, Assumptions, costs
from benchmarks.capacity.model import Cluster, Costs, Traffic
from benchmarks.capacity.sizing import Plan, check, encoder_seconds, language_seconds, plan
from benchmarks.svg import Lines, line_chart

RATES = (10, 100, 1_000, 10_000, 100_000)
HIT_RATES = (0.0, 0.5, 0.8, 0.95)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=float, default=1000, help="per second")
    parser.add_argument("--hit-rate", type=float, default=0.8, help="share of images whose embedding is in Redis")
    parser.add_argument("--stock-hit-rate", type=float, default=0.05, help="of a monolithic engine's own caches")
    parser.add_argument("--images", type=int, default=1, help="of a request")
    parser.add_argument("--text", type=int, default=64, help="text tokens of a request")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--hours", type=float, default=24, help="of new pictures that Redis shall hold")
    parser.add_argument("--tower", choices=TOWERS, default="pixtral-12b")
    parser.add_argument("--gpu", choices=DEVICES, default="h100")
    parser.add_argument("--batch", type=int, default=16, help="images of one forward")
    parser.add_argument("--sequences", type=int, default=128, help="of one step of a language replica")
    parser.add_argument("--table", action="store_true", help="10 to 100,000 requests a second by hit rate")
    parser.add_argument("--plot", type=Path, help="SVG file: devices over requests a second")
    for field in fields(Assumptions):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default, help="assumption: %(default)s")
    return parser.parse_args()


def traffic(chosen: argparse.Namespace, rate: float, hit_rate: float) -> Traffic:
    return Traffic(
        rate=rate,
        images=chosen.images,
        hit_rate=hit_rate,
        text_tokens=chosen.text,
        image_tokens=TOWERS[chosen.tower].tokens,
        answer_tokens=chosen.answer,
    )


def planned(chosen: argparse.Namespace, times: Costs, rate: float, hit_rate: float) -> Plan:
    base = Cluster(batch=chosen.batch, max_sequences=chosen.sequences)
    asked = traffic(chosen, rate, hit_rate)
    return plan(times, asked, hours=chosen.hours, stock_hit_rate=chosen.stock_hit_rate, cluster=base)


def one(chosen: argparse.Namespace, times: Costs) -> str:
    """One traffic, with what a simulated client sees."""
    asked = traffic(chosen, chosen.requests, chosen.hit_rate)
    found = planned(chosen, times, chosen.requests, chosen.hit_rate)
    seen = check(times, asked, found.cluster)
    lines = [
        f"{chosen.tower} on {chosen.gpu}, {chosen.requests:g} requests/s, {100 * chosen.hit_rate:g} % of images known",
        "",
        f"one image        {asked.image_tokens} tokens, {times.record_bytes / 1e6:.1f} MB, "
        f"{1000 * encoder_seconds(times, chosen.batch):.1f} ms in the tower",
        f"one answer       {1000 * language_seconds(times, asked, chosen.sequences):.1f} ms of a language replica",
        f"encoder replicas {found.cluster.encoders}",
        f"language replicas {found.cluster.language}",
        f"ingress          {found.cluster.ingress} replicas of one core",
        f"Redis            {found.cluster.shards} shards, {found.redis_bytes / 1e9:.2f} GB/s, "
        f"{found.lookups:,.0f} operations/s, {found.stored / 1e9:,.0f} GB for {chosen.hours:g} h",
        f"monolithic       {found.monolithic} devices (own hit rate {100 * chosen.stock_hit_rate:g} %), "
        f"here {found.devices}",
        f"break-even       {100 * found.break_even:.1f} % hits",
        f"simulated TTFT   median {1000 * seen.ttft_at(50):.0f} ms, p99 {1000 * seen.ttft_at(99):.0f} ms; use "
        + ", ".join(f"{name} {100 * share:.0f} %" for name, share in seen.use.items()),
    ]
    return "\n".join(lines)


def table(chosen: argparse.Namespace, times: Costs) -> str:
    """Rates by hit rates, as Markdown."""
    lines = [
        "| requests/s | hits | encoders | language | monolithic | ingress cores | Redis shards | Redis GB/s "
        f"| Redis TB for {chosen.hours:g} h |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for rate in RATES:
        for hit_rate in HIT_RATES:
            found = planned(chosen, times, rate, hit_rate)
            size = found.cluster
            lines.append(
                f"| {rate:,} | {100 * hit_rate:g} % | {size.encoders:,} | {size.language:,} | {found.monolithic:,} "
                f"| {size.ingress:,} | {size.shards:,} | {found.redis_bytes / 1e9:,.2f} | {found.stored / 1e12:,.2f} |"
            )
    return "\n".join(lines)


def plot(chosen: argparse.Namespace, times: Costs) -> str:
    """Devices over requests a second, for every hit rate and for monolithic engines."""
    rates = [10 * 10 ** (step / 4) for step in range(17)]
    series = {"monolithic": [(rate, float(planned(chosen, times, rate, 0.0).monolithic)) for rate in rates]}
    for hit_rate in HIT_RATES:
        found = [(rate, float(planned(chosen, times, rate, hit_rate).devices)) for rate in rates]
        series[f"lookonce, {100 * hit_rate:g} % hits"] = found
    return line_chart(Lines(f"{chosen.tower} on {chosen.gpu}", "requests per second", "devices", series))


def main() -> None:
    chosen = options()
    assumed = Assumptions(**{field.name: getattr(chosen, field.name) for field in fields(Assumptions)})
    times = costs(TOWERS[chosen.tower], LANGUAGES[chosen.tower], DEVICES[chosen.gpu], assumed)
    print(table(chosen, times) if chosen.table else one(chosen, times))
    if chosen.plot:
        chosen.plot.write_text(plot(chosen, times))


if __name__ == "__main__":
    main()
