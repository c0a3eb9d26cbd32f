"""A peer's side of `curation.py`: spherical k-means by faiss on one core.

Run by the benchmark with the interpreter of the peers' environment, never by hand: a folder with
`rows.npy` (float32[n, d]) and `start.npy` (float32[k, d]), and the number of iterations. Writes
`labels.npy` and prints one line of JSON.
"""

import json
import sys
import time
from pathlib import Path

import faiss
import numpy as np

if __name__ == "__main__":
    folder, iterations = Path(sys.argv[1]), int(sys.argv[2])
    faiss.omp_set_num_threads(1)
    rows, start = np.load(folder / "rows.npy"), np.load(folder / "start.npy")
    kmeans = faiss.Kmeans(
        rows.shape[1],
        len(start),
        niter=iterations,
        spherical=True,
        max_points_per_centroid=len(rows),
        min_points_per_centroid=1,
    )
    begin = time.process_time()
    kmeans.train(rows, init_centroids=start)
    seconds = time.process_time() - begin
    _, labels = kmeans.index.search(rows, 1)
    np.save(folder / "labels.npy", labels[:, 0])
    print(json.dumps({"seconds": seconds}))
