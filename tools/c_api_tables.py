#!/usr/bin/python3
"""Writes the two files that are made from client/include/lossd/c_api.h, where the C interface is written down:

  client/python/lossd/_structs.py   constants, structs and functions for ctypes
  tests/integration/c_api/abi.txt   functions, offsets of fields and values of enums, which compiled programs rely on

Both are committed, so that the Python package is installed without a C parser; tests/integration/c_api/abi_test.py says when
one of them is not what this program writes.

usage: tools/c_api_tables.py   (needs pycparser, which tools/setup.sh test installs; the environment variable CC names the compiler)
"""
import os
import re
import subprocess
import tempfile

from pycparser import c_ast, c_parser

from source_files import ROOT

HEADER = os.path.join(ROOT, "client/include/lossd/c_api.h")
PYTHON_MODULE = os.path.join(ROOT, "client/python/lossd/_structs.py")
ABI_LISTING = os.path.join(ROOT, "tests/integration/c_api/abi.txt")
LINE_LENGTH = 120  # of the Python package

# The types that the header takes from elsewhere: what a C parser has to know of each, and its name in ctypes.
TYPES = {
    "size_t": ("unsigned long", "c_size_t"),
    "int32_t": ("int", "c_int32"),
    "uint32_t": ("unsigned", "c_uint32"),
    "int64_t": ("long", "c_int64"),
    "uint64_t": ("unsigned long", "c_uint64"),
}
BUILT_IN = {"char": "c_char", "float": "c_float", "double": "c_double"}


class Interface:
    """The declarations of the header, each kind in the header's order."""

    def __init__(self, compiler, path=HEADER):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        self.constants = {name: int(value) for name, value in re.findall(r"^#define (LOSSD_\w+) (\d+)$", text, re.M)}
        self.enums = {}  # name: {constant: value}
        self.types = {}  # name: Struct with fields, or FuncDecl of a callback
        self.functions = {}  # name: FuncDecl
        for declaration in _parsed(compiler, text).ext:
            kind = declaration.type
            if isinstance(kind, c_ast.FuncDecl):
                self.functions[declaration.name] = kind
            elif isinstance(kind, c_ast.PtrDecl) and isinstance(kind.type, c_ast.FuncDecl):
                self.types[declaration.name] = kind.type
            elif isinstance(kind.type, c_ast.Struct) and kind.type.decls:
                self.types[declaration.name] = kind.type
            elif isinstance(kind.type, c_ast.Enum):
                values = {one.name: int(one.value.value) for one in kind.type.values.enumerators}
                self.enums[declaration.name] = values

    @property
    def structs(self):
        """name: names of its fields"""
        found = {name: kind for name, kind in self.types.items() if isinstance(kind, c_ast.Struct)}
        return {name: [field.name for field in kind.decls] for name, kind in found.items()}


def _parsed(compiler, text):
    own = re.sub(r"^#include.*$", "", text, flags=re.M)
    # Without __GNUC__ the header declares no attributes, which are none of the language's.
    command = [compiler, "-E", "-P", "-U__GNUC__", "-xc", "-"]
    plain = subprocess.run(command, input=own, check=True, capture_output=True, text=True).stdout
    known = "".join(f"typedef {meaning} {name};\n" for name, (meaning, _) in TYPES.items())
    return c_parser.CParser().parse(known + plain)


def python_name(name):
    """lossd_flush_options: FlushOptions"""
    return "".join(word.capitalize() for word in name.removeprefix("lossd_").split("_"))


def ctypes_name(node, types):
    """The type in ctypes. Memory and handles are addresses: void*."""
    if isinstance(node, c_ast.ArrayDecl):
        return f"{ctypes_name(node.type, types)} * {node.dim.value}"
    if isinstance(node, c_ast.TypeDecl):
        name = node.type.names[0]
        if name in types:
            return python_name(name)
        return "c." + (BUILT_IN[name] if name in BUILT_IN else TYPES[name][1])
    target = node.type
    if isinstance(target, c_ast.PtrDecl):
        return f"c.POINTER({ctypes_name(target, types)})"
    name = target.type.names[0]
    if name in types:
        return f"c.POINTER({python_name(name)})"
    # What is not const is freed by the caller, who has to keep the address.
    return "c.c_char_p" if name == "char" and "const" in target.quals else "c.c_void_p"


def signature(function, types):
    """The result and the arguments in ctypes."""
    result = function.type
    is_void = isinstance(result, c_ast.TypeDecl) and result.type.names == ["void"]
    arguments = [parameter for parameter in function.args.params if parameter.name is not None]
    return "None" if is_void else ctypes_name(result, types), [ctypes_name(one.type, types) for one in arguments]


def _type(name, kind, types):
    if isinstance(kind, c_ast.FuncDecl):
        result, arguments = signature(kind, types)
        return f"{python_name(name)} = c.CFUNCTYPE({', '.join([result, *arguments])})"
    fields = "".join(f'        ("{field.name}", {ctypes_name(field.type, types)}),\n' for field in kind.decls)
    return f"class {python_name(name)}(c.Structure):\n    _fields_ = [\n{fields}    ]"


def _function(name, function, types):
    result, arguments = signature(function, types)
    line = f'    "{name}": ({result}, [{", ".join(arguments)}]),'
    if len(line) <= LINE_LENGTH:
        return line
    return f'    "{name}": (\n        {result},\n        [{", ".join(arguments)}],\n    ),'


def python_module(interface):
    """The text of client/python/lossd/_structs.py, laid out as ruff does."""
    types = interface.types
    constants = ["\n".join(f"{name} = {value}" for name, value in interface.constants.items())]
    for enum, values in interface.enums.items():
        constants.append("\n".join([f"# {enum}"] + [f"{name} = {value}" for name, value in values.items()]))
    functions = [_function(name, one, types) for name, one in interface.functions.items()]
    initializers = [f'    {python_name(name)}: "{name}_init",' for name in types if f"{name}_init" in interface.functions]
    return "\n".join([
        '"""lossd/c_api.h for ctypes. tools/c_api_tables.py writes this file: change the header and run it."""',
        "",
        "from __future__ import annotations",
        "",
        "import ctypes as c",
        "from typing import Any",
        "",
        "\n\n".join(constants),
        "\n",
        "\n\n\n".join(_type(name, kind, types) for name, kind in types.items()),
        "\n",
        "# Which function of the library fills in the defaults of which struct.",
        "INITIALIZERS: dict[type[c.Structure], str] = {",
        *initializers,
        "}",
        "",
        "# The result and the arguments of each function.",
        "FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {",
        *functions,
        "}",
        "",
    ])


def layout(interface, compiler):
    """Lines "struct field offset bytes" and "enum NAME value", as the compiler has them."""
    prints = []
    for struct, fields in interface.structs.items():
        prints.append(f'printf("{struct} size %zu\\n", sizeof({struct}));')
        for field in fields:
            prints.append(f'printf("{struct}.{field} %zu %zu\\n", offsetof({struct}, {field}), sizeof((({struct}*)0)->{field}));')
    for enum, values in interface.enums.items():
        prints += [f'printf("{enum} {name} %d\\n", (int){name});' for name in values]
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/layout.c", "w", encoding="utf-8") as file:
            file.write(f'#include "{HEADER}"\n#include <stdio.h>\nint main(void) {{\n' + "\n".join(prints) + "\nreturn 0;\n}\n")
        subprocess.run([compiler, "-std=c99", "-pedantic", "-Werror", f"{folder}/layout.c", "-o", f"{folder}/layout"], check=True)
        return subprocess.run([f"{folder}/layout"], check=True, capture_output=True, text=True).stdout.splitlines()


def abi_listing(interface, compiler):
    """The text of tests/integration/c_api/abi.txt."""
    lines = [f"function {name}" for name in sorted(interface.functions)] + layout(interface, compiler)
    return "\n".join(lines) + "\n"


def made(compiler):
    """Path and text of each file."""
    interface = Interface(compiler)
    return {PYTHON_MODULE: python_module(interface), ABI_LISTING: abi_listing(interface, compiler)}


if __name__ == "__main__":
    for path, text in made(os.environ.get("CC", "cc")).items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        print(f"wrote {os.path.relpath(path, ROOT)}")
