"""An inspection for a person: tables of its launches, and what they make together."""

from typing import Any

from compiled_llm.api.tables import text_table
from compiled_llm.gpu_step.estimate import GAP_SECONDS
from compiled_llm.gpu_step.inspection import Inspection, Row
from compiled_llm.gpu_step.measured import Measured
from compiled_llm.gpu_step.transfers import BUS_SHARE

_CLASSES = ("memory", "integer", "float", "tensor", "conversion", "exchange", "control")


def text_of(inspection: Inspection, measured: Measured | None = None) -> str:
    """Tables of a layer's launches and of those around the layers, and what they make together."""
    first, last = inspection.spans[0], inspection.spans[-1]
    parts = {
        "before the first layer's attention": slice(0, first.start),
        f"a layer, from its attention to the next: {last.stop - last.start} launches": last,
        "from the last layer's attention on": slice(last.stop, len(inspection.rows)),
    }
    lines, has_links = [], inspection.num_link_bytes > 0
    for title, part in parts.items():
        rows = [_cells(inspection.rows[place], measured, place, has_links) for place in range(part.start, part.stop)]
        lines.append(f"{title}\n{text_table(rows)}\n")
    lines.append(
        f"{inspection.gpu.name}, {inspection.step.bucket.name}, {inspection.step.dtype}, "
        f"{inspection.contexts.num_keys} keys a request: "
        f"{inspection.num_launches} launches in {inspection.num_layers} layers, estimated "
        f"{inspection.seconds() * 1e3:.3f} ms ({GAP_SECONDS * 1e6:.1f} us between launches), "
        f"{inspection.bandwidth_share:.0%} of the bandwidth\n"
        f"launches from layer to layer: {' '.join(map(str, inspection.launches_per_layer))}\n"
        f"launches that may start while the one before still runs, which the estimate leaves out: "
        f"{inspection.num_programmatic}\n"
        f"{_links_text(inspection)}"
        f"inputs without a static address: {len(inspection.dynamic_inputs)}; reasons to skip the CUDA graph: "
        f"{'; '.join(inspection.skip_reasons) or 'none'}"
    )
    if inspection.transfers:
        lines.append(_transfers_text(inspection))
    return "\n".join(lines) + ("" if measured is None else _measured_text(measured, inspection))


def _links_text(inspection: Inspection) -> str:
    """What several GPUs exchange."""
    if not inspection.num_link_bytes:
        return ""
    exchanging = [place for place in inspection.order if inspection.rows[place].work.over_links]
    return (
        f"read of other GPUs' memory, which the estimate leaves out: {inspection.num_link_bytes / 1e6:.2f} MB in "
        f"{len(exchanging)} launches\n"
    )


def _transfers_text(inspection: Inspection) -> str:
    """What comes from host memory beside the launches."""
    found, rate = inspection.timeline, inspection.gpu.bus * BUS_SHARE / 1e9
    return (
        f"from host memory: {found.nbytes / 2**20:,.1f} MiB in {found.copies} copies beside the "
        f"launches, of which none is added. At {rate:.0f} GB/s ({BUS_SHARE:.0%} of the data sheet's, assumed) they "
        f"take {found.bus_seconds * 1e3:.3f} ms, and the step waits for them for {found.waiting_seconds * 1e3:.3f} ms"
    )


def _measured_text(measured: Measured, inspection: Inspection) -> str:
    """All of the step as it was measured, and what stands in no row."""
    busy, gaps = measured.busy_us / 1e3, measured.all_gaps_us / 1e3
    ratio = (busy + gaps) / (inspection.seconds() * 1e3)
    lines = [
        f"\nmeasured on {measured.gpu}: {busy:.3f} ms in launches and {gaps:.3f} ms between them, {ratio:.2f} of the "
        f"estimate; launches that are expected and were not found: {', '.join(measured.not_run) or 'none'}"
    ]
    if measured.unmatched:
        rows = [{"launch": one.name[:70], "launches": one.launches, "us of all": one.us} for one in measured.unmatched]
        lines.append(f"measured and not expected\n{text_table(rows)}")
    return "\n".join(lines)


def _cells(row: Row, measured: Measured | None, place: int, has_links: bool) -> dict[str, Any]:
    values = row.as_json()
    flight = f"{values['in_flight'] / 1024:.1f} of {values['wanted'] / 1024:.1f}" if "in_flight" in values else ""
    loop = values.get("loop") or {}
    return {
        "launch": row.name[:48],
        "kind": values["kind"],
        "read KB": values["read"] / 1024,
        "written KB": values["written"] / 1024,
        **({"links KB": values["over_links"] / 1024} if has_links else {}),
        "MFLOP": values["flops"] / 1e6,
        "us": values["us"],
        "bound by": values["bound_by"],
        **({} if measured is None else _measured_cells(measured, place, values["us"])),
        "programs": values.get("programs"),
        "an SM": values.get("programs_per_sm"),
        "registers": values.get("registers"),
        "shared": values.get("shared"),
        "spilled": values.get("spilled"),
        "load B": values.get("load_bytes"),
        "KB in flight": flight,
        "code": values.get("instructions"),
        "loop: " + "/".join(kind[:3] for kind in _CLASSES): "/".join(str(loop[kind]) for kind in _CLASSES if loop),
    }


def _measured_cells(measured: Measured, place: int, estimated: float) -> dict[str, Any]:
    us = measured.us[place]
    ratio = us / estimated if us is not None and estimated else None
    return {"measured us": us, "gap us": measured.gap_us[place], "/estimate": ratio}
