"""Write the patch series from the seam table, the flags and the installed (stock) SGLang.

    python scripts/make_patches.py

For maintainers: run it after a change of `plugin/flags.py` or `plugin/seams.py`; tests/patching compares the series
with both. No logic lives in a patch: an import guard, the fields of ServerArgs, one decorator a hooked function.
"""

from __future__ import annotations

import ast
import difflib
import textwrap
from pathlib import Path

from sglang_replayssm.plugin import flags, seams

OUT = Path(__file__).resolve().parent.parent / "patches" / f"sglang-{seams.PINNED_SGLANG}"
LINE = 88  # SGLang's line length

GUARD = '''\
"""Where this SGLang calls sglang-replayssm: `@replayssm_seam("module:function")`."""

try:
    from sglang_replayssm.patching.seam import replayssm_seam
except ModuleNotFoundError as error:
    if error.name != "sglang_replayssm":
        raise

    # Without the package every function is as it was, and the flag is refused.
    def replayssm_seam(hook):
        return _refuse_the_flag if hook.endswith(":check_server_args") else lambda f: f

    def _refuse_the_flag(check_server_args):
        def check(self):
            if self.enable_gdn_replayssm_spec:
                raise ValueError(
                    "--enable-gdn-replayssm-spec needs: pip install sglang-replayssm"
                )
            return check_server_args(self)

        return check
'''

# Name, title and modules (below sglang.srt) of each patch; together they hold every hooked seam.
SERIES = (
    ("0002-server-args", "The flags are fields of ServerArgs, checked with the others.", ("server_args",)),
    (
        "0003-scheduler",
        "A scheduler process switches the ring on, reports it, and survives a request's end in flight.",
        ("managers.scheduler", "managers.schedule_batch"),
    ),
    (
        "0004-memory",
        "Reserve and allocate the ring instead of the snapshots; note new rows.",
        ("model_executor.model_runner_kv_cache_mixin", "mem_cache.memory_pool"),
    ),
    (
        "0005-verify",
        "Reset or fold rows before an extend, fold before a slot is cached, verify from the ring, commit its cursors.",
        (
            "mem_cache.common",
            "model_executor.model_runner",
            "layers.attention.linear.gdn_backend",
            "layers.attention.hybrid_linear_attn_backend",
            "speculative.spec_utils",
        ),
    ),
)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    write("0001-import-guard", "Import sglang-replayssm if it is installed; run as stock without it.", guard_diff())
    hooked = {seam.module for seam in seams.SEAMS if seam.hook}
    for name, title, modules in SERIES:
        names = [f"sglang.srt.{module}" for module in modules]
        hooked -= set(names)
        write(name, title, "".join(module_diff(module) for module in names))
    if hooked:
        raise SystemExit(f"no patch of the series holds {', '.join(sorted(hooked))}")


def write(name: str, title: str, diff: str) -> None:
    (OUT / f"{name}.patch").write_text(f"{title}\n\n{diff}", encoding="utf-8")


def guard_diff() -> str:
    path = f"python/{seams.PATCH_MODULE.replace('.', '/')}.py"
    lines = GUARD.splitlines(keepends=True)
    head = (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
    )
    return head + "".join("+" + line for line in lines)


def module_diff(module: str) -> str:
    source = seams.read_module(seams.sglang_root(), module)
    path = f"python/{module.replace('.', '/')}.py"
    before, after = source.splitlines(keepends=True), patched(module, source)
    ast.parse("".join(after))
    return "".join(difflib.unified_diff(before, after, f"a/{path}", f"b/{path}"))


def patched(module: str, source: str) -> list[str]:
    """The module's lines with an import, a decorator per hooked function and, in server_args, the fields."""
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    insertions = [(import_line(tree, lines), f"from {seams.PATCH_MODULE} import replayssm_seam\n")]
    for seam in seams.SEAMS:
        if seam.hook and seam.module == module:
            node = find(tree, seam.name)
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])  # ours is the outermost, as a hook is
            insertions.append((first - 1, f'{" " * node.col_offset}@replayssm_seam("{seam.hook}")\n'))
    if module == "sglang.srt.server_args":
        start = next(i for i, line in enumerate(lines) if line.startswith("    linear_replayssm_cache_len: A["))
        end = next(i for i in range(start, len(lines)) if lines[i].startswith("    ] = "))
        insertions.append((end + 1, fields()))
    for at, text in sorted(insertions, reverse=True):
        lines.insert(at, text)
    return "".join(lines).splitlines(keepends=True)


def find(tree: ast.AST, name: str) -> ast.AST:
    for part in name.split("."):
        tree = [node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == part][-1]
    return tree


def import_line(tree: ast.Module, lines: list[str]) -> int:
    """Where isort would put our import among the module's imports of sglang."""
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("sglang.")]
    imports = [node for node in imports if "isort: skip" not in lines[node.end_lineno - 1]]
    later = [node for node in imports if node.module > seams.PATCH_MODULE]
    return later[0].lineno - 1 if later else imports[-1].end_lineno


def fields() -> str:
    text = "    # GDN ReplaySSM verify: see sglang-replayssm, which this tree calls.\n"
    for flag in flags.FLAGS:
        text += f"    {flag.name}: A[\n        {flag.type.__name__},\n"
        if flag.choices:
            choices = ", ".join(f'"{choice}"' for choice in flag.choices)
            help_text = literal(flag.help, 12).lstrip()
            text += f"        Arg(\n            help={help_text},\n            choices=[{choices}],\n        ),\n"
        else:
            text += f"{literal(flag.help, 8)},\n"
        default = f'"{flag.default}"' if isinstance(flag.default, str) else repr(flag.default)
        text += f"    ] = {default}\n"
    return text


def literal(text: str, indent: int) -> str:
    """The text as adjacent string literals, one a line."""
    rows = textwrap.wrap(text, LINE - indent - 3, break_long_words=False, break_on_hyphens=False)
    rows = [row + " " for row in rows[:-1]] + rows[-1:]
    return "\n".join(f'{" " * indent}"{row}"' for row in rows)


if __name__ == "__main__":
    main()
