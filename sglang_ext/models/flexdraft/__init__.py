"""FlexDraft: attention-only drafting inside the target's deep layers (FlexDraft sections 3 to 5)."""
