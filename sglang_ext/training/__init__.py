"""Making a drafter: regenerate responses with the target, train, evaluate offline, export."""
