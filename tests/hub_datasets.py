"""Splits of datasets as the Hub holds them: images and labels in Parquet files."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def coloured(label: int, size: int = 24) -> bytes:
    """A noisy image whose red says which class it is of."""
    pixels = np.random.default_rng(label).integers(0, 255, (size, size, 3), dtype=np.uint8)
    pixels[..., 0] = 20 * label
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def parquet(
    images: Sequence[bytes], labels: Sequence[object], names: Sequence[str] | None, group: int = 100
) -> bytes:
    """A split as `push_to_hub` of `datasets` lays it out."""
    kind: dict[str, object] = {"dtype": "string", "_type": "Value"}
    if names is not None:
        kind = {"names": list(names), "_type": "ClassLabel"}
    features = {"image": {"_type": "Image"}, "label": kind}
    rows = [{"bytes": data, "path": f"{n}.png"} for n, data in enumerate(images)]
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(rows, struct), "label": pa.array(labels)})
    table = table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=group, use_dictionary=False, compression="none")
    return file.getvalue()
