"""Kernel isolation for model-written programs; `docs/threat-model.md` says against what, and how.

    caller ── pool ── worker ──socket── zygote ──fork──> one isolated process per test
                         └──────────────pipes──────────────────────┘

`plain`, `remote`, `seccomp`, `kernel`, `harness` and `zygote` run inside a bare interpreter of their own: they import
the standard library and each other, never the rest of the package.
"""
