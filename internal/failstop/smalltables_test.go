package failstop

import (
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"
)

// TestSmallRuns: which tables are merged.
func TestSmallRuns(t *testing.T) {
	t.Parallel()
	table := func(first, last string, size uint64) pebble.SSTableInfo {
		var info pebble.SSTableInfo
		info.Smallest.UserKey, info.Largest.UserKey, info.Size = []byte(first), []byte(last), size
		return info
	}
	const kb = 1 << 10
	for name, c := range map[string]struct {
		levels [][]pebble.SSTableInfo
		want   []string
	}{
		"none": {},
		"one":  {levels: [][]pebble.SSTableInfo{{table("a1", "a2", kb)}}},
		"neighbors in all levels": {
			[][]pebble.SSTableInfo{{table("a5", "a6", kb)}, {table("a1", "a2", kb), table("a3", "a4", kb)}},
			[]string{"a1-a6 3, 3 KiB, 2 too many"},
		},
		"one of each range": {levels: [][]pebble.SSTableInfo{{table("a1", "a2", kb), table("b1", "b2", kb)}}},
		"ranges": {
			[][]pebble.SSTableInfo{{table("a1", "a2", kb), table("a3", "a4", kb), table("b1", "b2", kb), table("c1", "c2", kb), table("c3", "c4", kb)}},
			[]string{"a1-a4 2, b1-b2 1, c1-c4 2, 5 KiB, 2 too many"},
		},
		"a large one between": {
			[][]pebble.SSTableInfo{{table("a1", "a2", kb), table("a3", "a4", kb), table("a5", "a6", 64*kb), table("a7", "a8", kb), table("a9", "ax", kb)}},
			[]string{"a1-a4 2, 2 KiB, 1 too many", "a7-ax 2, 2 KiB, 1 too many"},
		},
		"a large one below": {
			levels: [][]pebble.SSTableInfo{{table("a3", "a4", kb), table("a5", "a6", kb)}, {table("a1", "a9", 200*kb)}},
		},
		"many within a large one": {
			[][]pebble.SSTableInfo{{table("a3", "a4", kb), table("a5", "a6", kb), table("a7", "a7", kb)}, {table("a1", "a9", 200*kb)}},
			[]string{"a1-a9 4, 203 KiB, 3 too many"},
		},
		"much": {
			[][]pebble.SSTableInfo{{table("a0", "a0", 400*kb), table("a0", "a0", 0), table("a0", "a0", 0), table("a0", "a0", 0), table("a0", "a0", 0), table("a0", "a0", 0), table("a0", "a0", 0)},
				{table("a1", "a1", 400*kb), table("a1", "a1", 0), table("a1", "a1", 0), table("a1", "a1", 0), table("a1", "a1", 0), table("a1", "a1", 0), table("a1", "a1", 0)},
				{table("a2", "a2", 400*kb), table("a2", "a2", 0), table("a2", "a2", 0), table("a2", "a2", 0), table("a2", "a2", 0), table("a2", "a2", 0), table("a2", "a2", 0)}},
			[]string{"a0-a1 14, 800 KiB, 13 too many", "a2-a2 7, 400 KiB, 6 too many"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var have []string
			for _, run := range smallRuns(c.levels, 1) {
				text := ""
				for _, s := range run.spans {
					text += fmt.Sprintf("%s-%s %d, ", s.first, s.last, s.tables)
				}
				have = append(have, fmt.Sprintf("%s%d KiB, %d too many", text, run.bytes/kb, run.excess))
			}
			require.Equal(t, c.want, have)
		})
	}
}
