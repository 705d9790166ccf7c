"""Test kit: servers in processes of their own, scripted drafters, and the laws that hold whoever drafts."""
