"""Kernel isolation for model-written programs; see `docs/threat-model.md`.

    caller ── pool ── worker ──socket── zygote ──fork──> one isolated process per test
                         └──────────────pipes──────────────────────┘

`plain`, `remote`, `seccomp`, `kernel`, `harness` and `zygote` run inside a separate bare interpreter: they import
the standard library and each other, never the rest of the package.
"""
