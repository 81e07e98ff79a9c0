package chart

import (
	"encoding/xml"
	"io"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/plot"
)

func TestTicks(t *testing.T) {
	labels := func(ticker plot.Ticker, low, high float64) (all []string) {
		for _, tick := range (ticks{ticker}).Ticks(low, high) {
			if tick.Label != "" {
				all = append(all, tick.Label)
			}
		}
		return all
	}
	require.Equal(t, []string{"0", "50,000", "100,000"}, labels(plot.DefaultTicks{}, 0, 119e3))
	require.Equal(t, []string{"1", "10", "100", "1,000", "10,000"}, labels(plot.LogTicks{}, 1, 5000))
	require.Equal(t, []string{"10", "20", "50", "100", "200"}, labels(plot.LogTicks{}, 10, 300)[:5])
	for v, want := range map[float64]string{0: "0", 0.1 + 0.2: "0.3", 1e6: "1,000,000", 2.5: "2.5", 0.00025: "0.00025"} {
		require.Equal(t, want, tickLabel(v))
	}
}

// TestCharts draws hard cases: gaps, values without a logarithm, no values at all. $CHARTS keeps
// the files for a look at them.
func TestCharts(t *testing.T) {
	dir := os.Getenv("CHARTS")
	if dir == "" {
		dir = t.TempDir()
	}
	var x, y, z []float64
	for i := range 600 {
		x = append(x, float64(i))
		y = append(y, 150_000+20_000*math.Sin(float64(i)/9))
		z = append(z, 90_000*math.Sqrt(float64(i)/600))
	}
	for i := 300; i < 310; i++ {
		y[i] = math.NaN()
	}
	a := Axes{Title: "Cycles over time", X: "seconds", Y: "cycles/s", Marks: []Mark{{300, "closed and reopened"}}}
	n := []float64{1, 2, 4, 8, 16, 32, 64, 128, 256}
	nan := math.NaN()
	for name, err := range map[string]error{
		"lines.svg": Lines(filepath.Join(dir, "lines.svg"), a, Series{"2 producers, 14 B", x, y}, Series{"10 producers, 64 KiB", x, z}),
		"log.svg": Lines(filepath.Join(dir, "log.svg"), Axes{Title: "Cycles over producers", X: "producers", Y: "cycles of a task a second", LogX: true, LogY: true},
			Series{"process", n, []float64{0, 20e3, 40e3, 70e3, 100e3, 150e3, 160e3, 162e3, 163e3}},
			Series{"disk", n, []float64{700, 1400, 2800, 5600, 11e3, 20e3, 31e3, 33e3, 35e3}}),
		"named.svg": Lines(filepath.Join(dir, "named.svg"), Axes{Title: "Backlog", X: "tasks that wait", Y: "tasks a second", LogY: true, Labels: []string{"none", "10,000", "1,000,000"}},
			Series{"plain", []float64{0, 1, 2}, []float64{400e3, 600e3, nan}}, Series{"kept", []float64{0, 1, 2}, []float64{200e3, 400e3, 300e3}}),
		"bars.svg": Bars(filepath.Join(dir, "bars.svg"), Axes{Title: "Peers", Y: "cycles/s"}, []string{"codeq, Run with batches of 64", "River on PostgreSQL", "missing"},
			Series{"process", nil, []float64{248e3, 12e3, nan}}, Series{"disk", nil, []float64{46e3, 1.2e3, nan}}),
		"logbars.svg": Bars(filepath.Join(dir, "logbars.svg"), Axes{Title: "Peers", Y: "cycles/s", LogY: true}, []string{"codeq", "backlite", "0"},
			Series{"", nil, []float64{248e3, 1.2e3, 0}}),
		"empty.svg": Lines(filepath.Join(dir, "empty.svg"), Axes{Title: "None", LogY: true}),
	} {
		require.NoError(t, err)
		f, err := os.Open(filepath.Join(dir, name))
		require.NoError(t, err)
		defer f.Close()
		text := 0
		for d := xml.NewDecoder(f); ; text++ {
			if _, err := d.Token(); err == io.EOF {
				break
			} else {
				require.NoError(t, err, name)
			}
		}
		require.Greater(t, text, 20, name)
	}
	require.ErrorContains(t, Lines(filepath.Join(dir, "bad.svg"), a, Series{"s", n, n[1:]}), "series s has 9 X and 8 Y")
	require.ErrorContains(t, Bars(filepath.Join(dir, "bad.svg"), a, []string{"a"}, Series{"s", nil, n}), "9 values for 1 labels")
	require.Error(t, Lines(filepath.Join(dir, "missing", "bad.svg"), a))
}
