package document

import (
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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
	require.True(t, strings.HasPrefix(string(text), "# Title\n\n`go run -C bench/report . -test"), "%s", text)
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
