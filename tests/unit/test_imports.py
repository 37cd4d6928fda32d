"""No module imports itself by way of others, imports for typing and within functions included.

The contracts in pyproject.toml look at rooms; this looks at modules, a package's own ``__init__`` among them.
"""

from __future__ import annotations

import pytest

grimp = pytest.importorskip("grimp")  # import-linter brings it
networkx = pytest.importorskip("networkx")


def test_no_module_imports_itself_by_way_of_others() -> None:
    imports = grimp.build_graph("memtrace", "memtrace_tui", cache_dir=None)
    graph = networkx.DiGraph()
    for module in imports.modules:
        graph.add_edges_from((module, other) for other in imports.find_modules_directly_imported_by(module))
    assert len(graph) > 300
    assert [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1] == []
