package benchstat

import (
	"math"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "results.txt")
	var all []Result
	for run := range 6 {
		for _, level := range []string{"process", "disk"} {
			rate := float64(1_200_000/len(level) + run) // 171,000 and 300,000
			all = append(all, Result{"Cycle/durability=" + level + "/way=" + Word("single calls, slow"), 1, []Value{
				{"cycles/s", rate}, {"rss-MB", 80}, {"p50-us", math.NaN()},
			}})
		}
	}
	all = append(all, Result{"Idle", 1, []Value{{"%core", 0.25}}})
	require.NoError(t, Write(file, all))
	table := func(c Comparison) (rows [][]any) {
		m, err := c.Run(t.Context(), file)
		require.NoError(t, err)
		header, rows := m.Table(map[string]string{"rss-B": "memory", "Idle": "nothing to do"})
		line := []any{}
		for _, h := range header {
			line = append(line, h)
		}
		return append([][]any{line}, rows...)
	}
	cycle := Comparison{Filter: ".name:Cycle", Units: []string{"rss-MB", "cycles/s"}, Row: "/way", Column: "/durability"}
	require.Equal(t, [][]any{
		{"", "", "process", "disk"},
		{"single-calls-slow", "memory", "80.0 MB ± 0%", "80.0 MB ± 0%"},
		{"single-calls-slow", "cycles/s", "171,000 ± 0%", "300,000 ± 0% (+75.00%)"},
	}, table(cycle))
	cycle.Down = true
	require.Equal(t, [][]any{
		{"", "memory", "cycles/s"},
		{"process", "80.0 MB ± 0%", "171,000 ± 0%"},
		{"disk", "80.0 MB ± 0%", "300,000 ± 0% (+75.00%)"},
	}, table(cycle))
	require.Equal(t, [][]any{{"", "%core"}, {"nothing to do", 0.25}}, table(Comparison{Filter: ".name:Idle", Units: []string{"%core"}, Row: ".name"}))

	m, err := Comparison{Filter: ".name:Cycle", Units: []string{"cycles/s"}, Row: "/durability"}.Run(t.Context(), file)
	require.NoError(t, err)
	require.Equal(t, 300_002.5, m.Of("disk", "cycles/s"))
	require.True(t, math.IsNaN(m.Of("none", "cycles/s")))

	_, err = Comparison{Filter: ".name:(", Row: ".name"}.Run(t.Context(), file)
	require.ErrorContains(t, err, "benchstat")
}
