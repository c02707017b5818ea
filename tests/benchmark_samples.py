"""Small files in the published formats of benchmarks, with prompts of our own."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

GENEVAL2: list[dict[str, Any]] = [
    {
        "prompt": "two red dogs left of a cat",
        "atom_count": 3,
        "vqa_list": [["Is there a dog?", "Yes"], ["How many dogs are there?", "two"], ["Are the dogs red?", "Yes"]],
        "skills": ["object", "count", "attribute"],
    },
    {"prompt": "a cat", "atom_count": 3, "vqa_list": [["Is there a cat?", "Yes"]], "skills": ["object"]},
]
DPG_COLUMNS = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple"
DPG = f"""{DPG_COLUMNS},question_natural_language
a1,"A red mug, on a table",,1,0,entity,whole,entity - whole (mug),Is there a mug?
a1,"A red mug, on a table",,2,1,attribute,color,"attribute - color (mug, red)",Is the mug red?
a1,"A red mug, on a table",,3,0,entity,whole,entity - whole (table),Is there a table?
a1,"A red mug, on a table",,4,"2,3",relation,spatial,"relation - spatial (mug, table, on)",Is the red mug on the table?
b2,A bird,,1,0,entity,whole,entity - whole (bird),Is there a bird?
"""
WISE = [
    {
        "Prompt": "the pastry shared at the Mid-Autumn Festival",
        "Explanation": "mooncakes",
        "Category": "Cultural knowledge",
        "Subcategory": "Festival",
        "prompt_id": 1,
    },
    {
        "Prompt": "a street in Lima when it is noon in Rome",
        "Explanation": "early morning light",
        "Category": "Spatio-temporal reasoning",
        "Subcategory": "Horizontal time",
        "prompt_id": 401,
    },
    {"Prompt": "iron left in rain", "Explanation": "rust", "Category": "Science", "prompt_id": 900},
]
UNIGENBENCH = [
    (
        "three red cups, no handles",
        {
            "Testpoints": ["Attribute - Color", "Attribute - Quantity", "Grammar - Negation"],
            "Testpoint Description": ["The cups are red", "There are three cups", "The cups have no handles"],
        },
    ),
    ("a cat in the style of Monet", {"Testpoints": ["Style"], "Testpoint Description": ["It looks like a Monet"]}),
]
VBENCH = [
    {
        "prompt_en": "a photo of a cell phone moving left",
        "dimension": ["subject_consistency", "dynamic_degree", "motion_smoothness"],
    },
    {"prompt_en": "a photo of three bowls moving left", "dimension": ["temporal_flickering"]},
    {"prompt_en": "a photo of a white cup moving left", "dimension": ["imaging_quality", "aesthetic_quality"]},
    {"prompt_en": "in the style of Monet", "dimension": ["appearance_style"]},
]
OCR = 'A sign that reads "OPEN"\nA poster with the words "good day"\n'


def write_benchmark(name: str, folder: Path) -> Path:
    """Write the file or folder of a benchmark and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "geneval2":
        return _write(folder / "geneval2_data.jsonl", "".join(json.dumps(row) + "\n" for row in GENEVAL2))
    if name == "dpg":
        return _write(folder / "dpg_bench.csv", DPG)
    if name == "wise":
        for file, rows in (("culture", WISE[:1]), ("science", WISE[1:])):
            _write(folder / "data_verified" / f"{file}.json", json.dumps(rows))
        return folder / "data_verified"
    if name == "unigenbench":
        table = io.StringIO()
        rows = [(index, prompt, json.dumps(points)) for index, (prompt, points) in enumerate(UNIGENBENCH)]
        csv.writer(table).writerows([("index", "prompt_en", "sub_dims_en"), *rows])
        return _write(folder / "test_prompts_en.csv", table.getvalue())
    if name == "t2i-compbench":
        for file, text in (("color_val", "a green bench and a blue bowl\n"), ("texture_val", "rubber boots\n")):
            _write(folder / "dataset" / f"{file}.txt", text)
        _write(folder / "dataset" / "color_train.txt", "a red car\n")
        _write(folder / "dataset" / "spatial_val.txt", "a dog on the left of a car\n")
        return folder / "dataset"
    if name == "vbench-lite":
        return _write(folder / "VBench_full_info.json", json.dumps(VBENCH))
    return _write(folder / "test.txt", OCR)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
