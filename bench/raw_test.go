package bench

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/bench/workload"
)

// BenchmarkRawPebble is the limit that the engine works under.
func BenchmarkRawPebble(b *testing.B) {
	for _, dbs := range []int{1, 2} {
		b.Run(fmt.Sprintf("dbs=%d", dbs), func(b *testing.B) {
			raw, err := workload.OpenRawPebble(b.TempDir(), dbs, workers)
			require.NoError(b, err)
			measure(b, workload.Load{Producers: dbs, Batch: batch}, raw)
			require.NoError(b, raw.Close())
		})
	}
}
