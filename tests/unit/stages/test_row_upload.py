"""Rows are uploaded once for steps that use the same ones."""

import numpy as np
import torch

from stages.runtime.embeddings_in import RowUpload

CPU = torch.device("cpu")


def test_the_same_rows_are_uploaded_once_until_they_may_have_changed() -> None:
    rows, upload = np.arange(12, dtype=np.uint8).reshape(4, 3), RowUpload()
    first = upload.upload(rows, np.array([3, 1]), CPU)
    assert first.tolist() == [[9, 10, 11], [3, 4, 5]]
    assert upload.upload(rows, np.array([3, 1]), CPU) is first
    rows += 100
    upload.rows_changed()
    assert upload.upload(rows, np.array([3, 1]), CPU).tolist() == [[109, 110, 111], [103, 104, 105]]
    assert first.tolist() == [[9, 10, 11], [3, 4, 5]]


def test_other_rows_in_another_order_or_number_are_uploaded() -> None:
    rows, upload = np.arange(4, dtype=np.uint8).reshape(4, 1), RowUpload()
    for index in ([3, 1], [1, 3], [1], [1, 1], [3, 1]):
        assert upload.upload(rows, np.array(index), CPU).flatten().tolist() == index
