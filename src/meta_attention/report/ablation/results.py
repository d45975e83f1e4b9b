"""All figures of an ablation as plain data: what is committed, and what the page is drawn from."""

from typing import Any

from meta_attention.report.ablation.claims import has_claims, own_questions, paper_claims
from meta_attention.report.ablation.further import further_record
from meta_attention.report.ablation.read import Ablation
from meta_attention.report.ablation.summary import beyond_static, summarise


def to_record(ablation: Ablation) -> dict[str, Any]:
    """Tables, claims, and what they were measured on and with."""
    first = ablation.runs[0].result
    is_ablation = "ablation" in ablation.experiments
    rows = {name: summarise(ablation, name) for name in ablation.experiments}
    return {
        "is_short": ablation.plan["is_short"],
        "settings": ablation.plan["settings"],
        "seeds": ablation.plan["seeds"],
        "text": first["text"],
        "held_out": first["held_out"],
        "machine": {k: v for k, v in first["machine"].items() if k != "seconds"},
        "experiments": {name: [row.to_dict() for row in found] for name, found in rows.items()},
        "further": further_record(ablation),
        "beyond_static": beyond_static(rows["ablation"]) if is_ablation else {},
        "claims": [c.to_dict() for c in paper_claims(ablation)] if has_claims(ablation) else [],
        "questions": [claim.to_dict() for claim in own_questions(ablation)],
        "missing": ablation.missing,
        "notes": ablation.plan["notes"],
    }
