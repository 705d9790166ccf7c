"""The CPU host platform: lets the stock SGLang wheel serve on a machine without an accelerator."""
