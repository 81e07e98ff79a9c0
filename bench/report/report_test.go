package report

import (
	"encoding/xml"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/plot"
)

func TestNumbers(t *testing.T) {
	for x, want := range map[float64]string{
		0: "0", 0.012345: "0.0123", 1: "1.00", 9.999: "10.0", 12.34: "12.3", 999.9: "1,000", 1234: "1,230",
		163482.2: "163,000", 1234567: "1,230,000", -1234: "-1,230", math.NaN(): "-",
	} {
		require.Equal(t, want, Number(x))
	}
	for d, want := range map[time.Duration]string{
		0: "0 s", 15 * time.Nanosecond: "15.0 ns", 1234 * time.Microsecond: "1.23 ms", 400 * time.Microsecond: "400 us",
		90 * time.Second: "90.0 s", 75 * time.Minute: "1h15m0s",
	} {
		require.Equal(t, want, Duration(d))
	}
	for n, want := range map[int64]string{14: "14.0 B", 65536: "65.5 kB", 80_000_000: "80.0 MB", 999_999: "1.00 MB"} {
		require.Equal(t, want, Bytes(n))
	}
	for v, want := range map[float64]string{0: "0", 0.1 + 0.2: "0.3", 1e6: "1,000,000", 2.5: "2.5", 0.00025: "0.00025"} {
		require.Equal(t, want, tickLabel(v))
	}
}

func TestTicks(t *testing.T) {
	labels := func(ticks []plot.Tick) (all []string) {
		for _, tick := range ticks {
			if tick.Label != "" {
				all = append(all, tick.Label)
			}
		}
		return all
	}
	require.Equal(t, []string{"0", "20,000", "40,000", "60,000", "80,000", "100,000"}, labels(linearTicks(0, 119e3)))
	require.Equal(t, []string{"0", "0.5", "1", "1.5", "2", "2.5", "3"}, labels(linearTicks(0, 3)))
	require.Equal(t, []string{"-1", "0", "1", "2", "3", "4"}, labels(linearTicks(-1, 4)))
	require.Equal(t, []string{"100", "200", "500", "1,000", "2,000"}, labels(logTicks(100, 3000)))
	require.Equal(t, []string{"1", "10", "100", "1,000", "10,000", "100,000", "1,000,000"}, labels(logTicks(1, 3e6)))
}

func TestDocument(t *testing.T) {
	m, err := ThisMachine(t.TempDir())
	require.NoError(t, err)
	require.Positive(t, m.Syncs)
	require.NotEmpty(t, m.FileSystem)
	d := New("Title", m)
	d.Heading("Part")
	d.List("one", "two")
	d.Table([]string{"what", "cycles", "rate", "p50", "note"},
		[]any{"a|b", 1234567, 1234.5, 400 * time.Microsecond},
		[]any{"c", int64(5), math.NaN(), time.Duration(0), "missing"})
	d.Image("Cycles", "x.svg")
	file := filepath.Join(t.TempDir(), "doc.md")
	require.NoError(t, d.Write(file))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(text), "# Title\n\n`go run -C bench/report ."), "%s", text)
	require.Contains(t, string(text), m.String())
	require.True(t, strings.HasSuffix(string(text), `
## Part

- one
- two

| what | cycles | rate | p50 | note |
| --- | ---: | ---: | ---: | --- |
| a\|b | 1,234,567 | 1,230 | 400 us |  |
| c | 5 | - | 0 s | missing |

![Cycles](x.svg)
`), "%s", text)
	entries, err := os.ReadDir(filepath.Dir(file))
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.Error(t, d.Write(filepath.Join(t.TempDir(), "missing", "doc.md")))
}

func TestQuoted(t *testing.T) {
	require.Equal(t, "-payload=14,65536", quoted("-payload=14,65536"))
	require.Equal(t, "''", quoted(""))
	require.Equal(t, `'it'\''s $1'`, quoted("it's $1"))
}

func TestCommit(t *testing.T) {
	dir := t.TempDir()
	require.Equal(t, "unknown", Commit(dir))
	git := func(args ...string) {
		out, err := exec.Command("git", append([]string{"-C", dir, "-c", "user.name=n", "-c", "user.email=e"}, args...)...).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	write := func(name string) {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(name), 0o644))
	}
	git("init", "-q")
	write("a")
	git("add", "-A")
	git("commit", "-q", "-m", "a")
	clean := Commit(dir)
	require.Regexp(t, "^[0-9a-f]{7,}$", clean)
	write("bench/results/r.md")
	require.Equal(t, clean, Commit(dir), "results are no change of what is measured")
	write("bench/b.go")
	require.Equal(t, clean+"+changes", Commit(filepath.Join(dir, "bench")))
}

// TestCharts draws what is hard: gaps, values that a logarithm has not, no
// values at all. Its files are kept in $REPORT_CHARTS for somebody to look at.
func TestCharts(t *testing.T) {
	dir := os.Getenv("REPORT_CHARTS")
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
