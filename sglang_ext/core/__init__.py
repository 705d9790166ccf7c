"""Pure torch: what to draft, how wide, which mask, which tokens are accepted. Knows no engine."""
