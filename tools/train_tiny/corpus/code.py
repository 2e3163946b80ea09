"""Small Python functions, each with a request for it."""

from tools.train_tiny.corpus.document import PROMPT, Document, Draw

# name, arguments, what it does, body; {0} and {1} are the argument names.
FUNCTIONS = (
    ("add", 2, "the sum of {0} and {1}", "return {0} + {1}"),
    ("subtract", 2, "the difference of {0} and {1}", "return {0} - {1}"),
    ("multiply", 2, "the product of {0} and {1}", "return {0} * {1}"),
    ("divide", 2, "{0} divided by {1}", "return {0} / {1}"),
    ("average", 2, "the mean of {0} and {1}", "return ({0} + {1}) / 2"),
    ("power", 2, "{0} to the power of {1}", "return {0} ** {1}"),
    ("remainder", 2, "the remainder of {0} divided by {1}", "return {0} % {1}"),
    (
        "largest", 2, "the larger of {0} and {1}",
        "if {0} > {1}:\n        return {0}\n    return {1}",
    ),
    (
        "smallest", 2, "the smaller of {0} and {1}",
        "if {0} < {1}:\n        return {0}\n    return {1}",
    ),
    ("is_equal", 2, "true if {0} equals {1}", "return {0} == {1}"),
    ("contains", 2, "true if {1} is in {0}", "return {1} in {0}"),
    ("repeat", 2, "{0} repeated {1} times", "return {0} * {1}"),
    ("square", 1, "the square of {0}", "return {0} * {0}"),
    ("double", 1, "twice {0}", "return 2 * {0}"),
    ("negate", 1, "{0} with its sign changed", "return -{0}"),
    ("absolute", 1, "{0} without its sign", "if {0} < 0:\n        return -{0}\n    return {0}"),
    ("is_even", 1, "true if {0} is even", "return {0} % 2 == 0"),
    ("is_odd", 1, "true if {0} is odd", "return {0} % 2 == 1"),
    ("first", 1, "the first item of {0}", "return {0}[0]"),
    ("last", 1, "the last item of {0}", "return {0}[-1]"),
    ("reverse", 1, "{0} in reverse", "return {0}[::-1]"),
    ("count", 1, "the number of items in {0}", "return len({0})"),
    (
        "total", 1, "the sum of all items in {0}",
        "result = 0\n    for item in {0}:\n        result += item\n    return result",
    ),
    (
        "factorial", 1, "the factorial of {0}",
        "if {0} < 2:\n        return 1\n    return {0} * factorial({0} - 1)",
    ),
    ("greet", 1, "a greeting for {0}", 'return "Hello, " + {0}'),
)  # fmt: skip
ARGUMENTS = (("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("n", "m"))
REQUESTS = (
    "Write a Python function that returns {does}.",
    "Write a function {name} that returns {does}.",
)


def code_document(draw: Draw) -> Document:
    document = Document()
    count = draw.rng.randint(1, max(1, min(4, draw.room // 60)))
    for index, chosen in enumerate(draw.rng.sample(FUNCTIONS, count)):
        document.add("\n\n" if index else "").add(source(chosen, draw.rng.choice(ARGUMENTS)))
    return document.add("\n")


def function_document(draw: Draw) -> Document:
    chosen = draw.rng.choice(FUNCTIONS)
    return Document().add(source(chosen, draw.rng.choice(ARGUMENTS))).add("\n")


def source(function: tuple[str, int, str, str], names: tuple[str, str]) -> str:
    name, num_arguments, does, body = function
    signature = ", ".join(names[:num_arguments])
    return (
        f"def {name}({signature}):\n"
        f'    """Return {does.format(*names)}."""\n'
        f"    {body.format(*names)}"
    )


def code_exchange(draw: Draw) -> tuple[Document, Document]:
    chosen = draw.rng.choice(FUNCTIONS)
    names = draw.rng.choice(ARGUMENTS)
    request = draw.rng.choice(REQUESTS).format(name=chosen[0], does=chosen[2].format(*names))
    return Document().add(request, PROMPT), Document().add(source(chosen, names))
