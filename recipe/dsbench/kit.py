"""Helpers for small tables, put beside a task's files: three calls make a submission.

    prepare("size", "rooms")            X_train.pkl, y_train.pkl, X_test.pkl from one to three columns
    train("linear")                     model.pkl: a weighted sum of the columns; "bowl": of their squares; or "mean"
    submit("flat", "rent", "value")     submission.csv: id column, target, and "value", "label" or "probability"

Invariant: only the standard library, so that a program starts in milliseconds; the same files give the same results. A
wrong argument ends the program with one line and exit code 1.
The target is the column of train.csv that test.csv lacks.
"""

import csv
import os
import pickle

FOLDS = 2
MOST_COLUMNS = 3
MODELS = ("linear", "bowl", "mean")
FORMS = ("value", "label", "probability")


def prepare(*columns):
    """Scale numbers to [-1, 1], put 0 into empty cells, and make a 0/1 column of each value of a text column."""
    train, test = _read("train.csv"), _read("test.csv")
    target = next(name for name in train[0] if name not in test[0])
    for name in columns:
        if name not in test[0]:
            raise SystemExit(f"no column {name}")
    if not 1 <= len(set(columns)) == len(columns) <= MOST_COLUMNS:
        raise SystemExit(f"name one to {MOST_COLUMNS} different columns")
    y = [_number(row[target]) if _number(row[target]) is not None else row[target] for row in train]
    x_train, x_test = [[] for _ in train], [[] for _ in test]
    for name in columns:
        texts = [row[name] for row in train if row[name]]
        numbers = [number for number in map(_number, texts) if number is not None]
        if not numbers or len(numbers) < len(texts):
            for value in sorted({row[name] for row in train}):
                _append(x_train, [float(row[name] == value) for row in train])
                _append(x_test, [float(row[name] == value) for row in test])
            continue
        middle, scale = (min(numbers) + max(numbers)) / 2, (max(numbers) - min(numbers)) / 2 or 1.0
        for rows, x in ((train, x_train), (test, x_test)):
            cells = [_number(row[name]) for row in rows]
            _append(x, [0.0 if cell is None else (cell - middle) / scale for cell in cells])
    _save("X_train.pkl", x_train)
    _save("y_train.pkl", y)
    _save("X_test.pkl", x_test)
    print("---PREPROCESSING_SUMMARY---")
    print(f"columns: {', '.join(columns)}")
    print(f"validation: {_reported(min(_errors('linear', x_train, y), _errors('bowl', x_train, y)), y)}")
    print("---END_SUMMARY---")


def train(kind):
    """Fit a model on the prepared rows and save it."""
    x, y = _load("X_train.pkl"), _load("y_train.pkl")
    _save("model.pkl", fit(kind, x, y))
    print("---MODEL_SUMMARY---")
    print(f"model: {kind}")
    print(f"validation: {_reported(_errors(kind, x, y), y)}")
    print("---END_SUMMARY---")


def submit(id_column, target, form):
    """Write the model's predictions for the rows of test.csv."""
    if form not in FORMS:
        raise SystemExit(f"no form {form}; forms: {', '.join(FORMS)}")
    rows, model = _read("test.csv"), _load("model.pkl")
    predictions = [predict(model, x) for x in _load("X_test.pkl")]
    if id_column not in rows[0]:
        raise SystemExit(f"no column {id_column}")
    with open("submission.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([id_column, target])
        writer.writerows(
            [row[id_column], _written(scores, model, form)] for row, scores in zip(rows, predictions, strict=True)
        )
    print(f"submission.csv: {len(rows)} rows, columns {id_column}, {target}, form {form}")


def fit(kind, x, y):
    """Return a model: one column of scores per class, or one of values."""
    if kind not in MODELS:
        raise SystemExit(f"no model {kind}; models: {', '.join(MODELS)}")
    classes = sorted(set(y)) if isinstance(y[0], str) else []
    targets = [[float(value == name) for name in classes] if classes else [value] for value in y]
    return {"kind": kind, "classes": classes, "weights": _least_squares([_terms(kind, row) for row in x], targets)}


def predict(model, row):
    """Return the scores of the classes, or the value in a list."""
    terms = _terms(model["kind"], row)
    return [sum(weight * term for weight, term in zip(weights, terms, strict=True)) for weights in model["weights"]]


def _terms(kind, row):
    return [1.0, *({"linear": row, "bowl": [value**2 for value in row], "mean": []}[kind])]


def _errors(kind, x, y):
    """Return the mean error on rows left out of the fit, and that of guessing: a share of wrong labels, or the RMSE."""
    errors, guesses = [], []
    for fold in range(FOLDS):
        kept = [index for index in range(len(x)) if index % FOLDS != fold]
        model, mean = (fit(name, [x[index] for index in kept], [y[index] for index in kept]) for name in (kind, "mean"))
        for index in range(fold, len(x), FOLDS):
            errors.append(_error(model, x[index], y[index]))
            guesses.append(_error(mean, x[index], y[index]))
    power = 1.0 if isinstance(y[0], str) else 0.5
    return tuple((sum(values) / len(values)) ** power for values in (errors, guesses))


def _error(model, row, truth):
    scores = predict(model, row)
    if model["classes"]:
        return float(_label(model, scores) != truth)
    return (scores[0] - truth) ** 2


def _label(model, scores):
    return model["classes"][max(range(len(scores)), key=scores.__getitem__)]


def _reported(errors, y):
    if isinstance(y[0], str):
        return "accuracy {:.2f} (guessing: {:.2f})".format(*(1 - error for error in errors))
    return "rmse {:.1f}% of the range (guessing: {:.1f}%)".format(
        *(100 * error / (max(y) - min(y)) for error in errors)
    )


def _least_squares(x, targets, ridge=1e-3):
    """Return the weights of each target by solving (X'X + ridge) w = X'y."""
    size = len(x[0])
    rows = [[sum(r[i] * r[j] for r in x) + ridge * (i == j) for j in range(size)] for i in range(size)]
    for i, row in enumerate(rows):
        row += [sum(r[i] * t[k] for r, t in zip(x, targets, strict=True)) for k in range(len(targets[0]))]
    for i in range(size):  # Gauss and Jordan, with the largest pivot
        pivot = max(range(i, size), key=lambda index: abs(rows[index][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in range(size):
            if j != i:
                rows[j] = [a - rows[j][i] * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [[row[size + k] for row in rows] for k in range(len(targets[0]))]


def _written(scores, model, form):
    classes = model["classes"]
    if form == "value":
        return f"{scores[0]:.6g}"
    if not classes:
        raise SystemExit(f"the target is a number; form {form} is for classes")
    if form == "label":
        return _label(model, scores)
    return f"{min(1.0, max(0.0, scores[-1])):.6g}"


def _number(text):
    try:
        return float(text)
    except ValueError:
        return None


def _append(rows, values):
    for row, value in zip(rows, values, strict=True):
        row.append(value)


def _read(name):
    with open(name, newline="") as file:
        return list(csv.DictReader(file))


def _save(name, value):
    with open(name, "wb") as file:
        pickle.dump(value, file)


def _load(name):
    if not os.path.exists(name):
        raise SystemExit(f"{name} is missing")
    with open(name, "rb") as file:
        return pickle.load(file)
