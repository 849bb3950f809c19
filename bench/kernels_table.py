"""A markdown table from the JSON of bench_kernels.py: ``python bench/kernels_table.py FILE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

OURS = "fastir_kernels"


def table(report: dict[str, Any]) -> str:
    """One section per group; times are medians, and the factor is the peer's time over ours."""
    lines = [f"{report['machine_info']['cpu'].get('brand_raw', 'CPU')}, {report['machine_info']['cpu']['count']} cores"]
    for group in dict.fromkeys(b["group"] for b in report["benchmarks"]):
        entries = [b for b in report["benchmarks"] if b["group"] == group]
        entries.sort(key=lambda b: b["stats"]["median"])
        base = next(b["stats"]["median"] for b in entries if b["name"] == OURS)
        lines += [
            "",
            f"**{group}**",
            "",
            "| | median s | x ours | peak extra MiB | error |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for b in entries:
            median, info = b["stats"]["median"], b["extra_info"]
            cells = (
                b["name"],
                f"{median:.3f}",
                f"{median / base:.2f}",
                f"{info['peak_extra_mib']:.0f}",
                f"{info['error']:.1e}",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
