package endurance

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/bench/report/internal/command"
	"codeq/bench/report/internal/document"
	"codeq/bench/workload"
)

// steady is a point of 200 s: two lives of 100 samples.
func steady() []sample {
	var all []sample
	for i := range 200 {
		all = append(all, sample{
			Seconds: float64(i + 1), Interval: 1, Life: float64(1 + i/100), Completed: 1000, Rate: 1000,
			Resident: 100e6, Disk: 200e6,
		})
	}
	return all
}

// throughCSV writes samples and reads them again.
func throughCSV(t *testing.T, samples []sample) []sample {
	var text bytes.Buffer
	w := csv.NewWriter(&text)
	require.NoError(t, newEncoder(w).Encode(samples))
	w.Flush()
	require.NoError(t, w.Error())
	again, err := readSamples(text.Bytes())
	require.NoError(t, err)
	return again
}

func TestTenths(t *testing.T) {
	s := steady()
	for i := range s { // the n-th tenth completes n thousand a second
		s[i].Completed = 1000 * float64(i/20+1)
	}
	s[3].P99, s[4].Written = 0.123456, 1.5e12
	s = throughCSV(t, s)
	require.Len(t, s, 200)
	require.Equal(t, 0.123456, s[3].P99)
	require.Equal(t, 1.5e12, s[4].Written)
	for i, part := range tenths(s) {
		require.Len(t, part.samples, 20)
		require.InDelta(t, 20, part.seconds, 1e-9)
		require.Equal(t, 1000*float64(i+1), part.rate())
	}

	// Intervals that are not a second: a rate is cycles over time, not a mean of rates.
	uneven := []sample{{Seconds: 4, Interval: 4, Life: 1, Completed: 400}}
	for i := range 16 {
		uneven = append(uneven, sample{Seconds: 4 + float64(i+1)/4, Interval: 0.25, Life: 1, Completed: 1})
	}
	parts := tenths(uneven)
	cycles := 0.0
	for _, part := range parts {
		cycles += part.cycles
	}
	require.Equal(t, 416.0, cycles)
	require.Equal(t, 100.0, parts[2].rate())
	require.Equal(t, 4.0, parts[9].rate())
	require.Empty(t, tenths(nil)[0].samples)

	_, err := readSamples([]byte("a,b\n1,2\n"))
	require.ErrorContains(t, err, "columns")
}

func TestJudge(t *testing.T) {
	p := point{2, 8, 14}
	failures := func(change func(i int, s *sample)) (texts []string) {
		all := steady()
		for i := range all {
			change(i, &all[i])
		}
		for _, v := range judge(p, throughCSV(t, all)) {
			if v.failed {
				texts = append(texts, v.text)
			}
		}
		return texts
	}
	require.Empty(t, failures(func(int, *sample) {}))
	lastTenth := func(cycles float64) func(int, *sample) {
		return func(i int, s *sample) {
			if i >= 180 {
				s.Completed = cycles
			}
		}
	}
	require.Empty(t, failures(lastTenth(901)))
	require.Equal(t, []string{"2 producers, 14 B: the last tenth is at 0.90 of the second tenth (899 and 1,000 cycles/s); at least 0.90"},
		failures(lastTenth(899)))
	require.Len(t, failures(func(_ int, s *sample) { s.Completed = 0 }), 1, "no cycles at all are no ratio")
	require.Empty(t, failures(func(i int, s *sample) {
		if i < 20 { // the first tenth does not count
			s.Completed = 5000
		}
	}))

	// Noise is not growth. Growth while the queue is open is, and growth with every life.
	require.Empty(t, failures(func(i int, s *sample) { s.Resident += 20e6 * math.Sin(float64(i)) }))
	require.Equal(t, []string{"2 producers, 14 B: memory: at most 610 MB in the second half of the first life, after 355 MB; at most 1.25 times that and 16.8 MB"},
		failures(func(i int, s *sample) { s.Resident = 100e6 + 5.1e6*float64(i%100+1) }))
	grown := failures(func(i int, s *sample) { s.Disk *= s.Life })
	require.Len(t, grown, 1)
	require.Contains(t, grown[0], "disk: at most 400 MB in the second life, after 200 MB")

	short := judge(p, steady()[:99])
	require.Len(t, short, 1)
	require.False(t, short[0].failed)
	require.Contains(t, short[0].text, "not judged")
	require.False(t, judge(p, nil)[0].failed)
}

func TestLine(t *testing.T) {
	s := steady()
	s[0].Rate = 2000
	l := line("x", s, func(s *sample) float64 { return s.Rate })
	require.Len(t, l.X, 201, "a sample each, and the gap")
	require.Equal(t, []float64{2000, 1000}, l.Y[:2])
	require.True(t, math.IsNaN(l.Y[100]))
	require.Equal(t, []float64{100, 100, 101}, l.X[99:102])

	long := steady()
	for range 3 { // 1,600 samples: 6 a point
		long = append(long, long...)
	}
	for i := range long {
		long[i].Life, long[i].Seconds, long[i].Rate = 1, float64(i+1), float64(i%2)
	}
	l = line("x", long, func(s *sample) float64 { return s.Rate })
	require.LessOrEqual(t, len(l.X), longestLine)
	require.Equal(t, 0.5, l.Y[0])
	require.Equal(t, 1600.0, l.X[len(l.X)-1])
}

// small is a run of seconds.
func small(t *testing.T) *config {
	return &config{
		Options: command.Options{Out: t.TempDir(), Dir: t.TempDir()},
		time:    2 * time.Second, producers: []int{2}, workers: 2, payloads: []int{14}, backlog: 100, cooldown: time.Millisecond,
		durability: codeq.DurabilityProcess, progress: t.Logf,
	}
}

func TestRun(t *testing.T) {
	c := small(t)
	require.NoError(t, c.run(t.Context()))
	text, err := os.ReadFile(filepath.Join(c.Out, "endurance-2p-14B.csv"))
	require.NoError(t, err)
	s, err := readSamples(text)
	require.NoError(t, err)
	require.Len(t, s, 2)
	for i, s := range s {
		require.Equal(t, float64(i+1), s.Life)
		require.Positive(t, s.Completed)
		require.Positive(t, s.P50)
		require.LessOrEqual(t, s.P50, s.P99)
		require.Less(t, s.Max, 2e6, "latencies are of this life")
		require.Positive(t, s.CPU)
		require.Positive(t, s.Resident)
		require.Positive(t, s.Heap)
		require.Positive(t, s.Writes)
		require.GreaterOrEqual(t, s.Written, 14*s.Created)
		require.Positive(t, s.Disk)
		require.Positive(t, s.MemTables)
		require.Positive(t, s.Logged)
	}
	text, err = os.ReadFile(filepath.Join(c.Out, "endurance.md"))
	require.NoError(t, err)
	require.Contains(t, string(text), "- 2 producers, 14 B: not judged")
	requireEmpty(t, c.Dir)
}

// TestResults renders the samples in bench/results.
func TestResults(t *testing.T) {
	c := small(t)
	var all []outcome
	for _, p := range []point{{2, 8, 14}, {10, 40, 14}, {2, 8, 64 << 10}, {10, 40, 64 << 10}} {
		text, err := os.ReadFile("../../../results/endurance-" + p.file() + ".csv")
		require.NoError(t, err)
		s, err := readSamples(text)
		require.NoError(t, err)
		require.Len(t, s, 300)
		all = append(all, outcome{point: p, samples: s, verdicts: judge(p, s)})
	}
	require.NoError(t, c.write(document.Machine{}, all))
	text, err := os.ReadFile(filepath.Join(c.Out, "endurance.md"))
	require.NoError(t, err)
	require.Contains(t, string(text), "- 2 producers, 14 B: the last tenth is at 1.01 of the second tenth (73,300 and 72,400 cycles/s); at least 0.90")
	require.Contains(t, string(text), "](endurance-latency-65536B.svg)")
}

// TestInterrupted: an interrupted run writes its samples, and leaves no files behind.
func TestInterrupted(t *testing.T) {
	c := small(t)
	c.time, c.producers = time.Hour, []int{2, 3}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		for ctx.Err() == nil { // until there is a sample
			text, _ := os.ReadFile(filepath.Join(c.Out, "endurance-2p-14B.csv"))
			if bytes.Count(text, []byte("\n")) > 1 {
				cancel()
			}
			time.Sleep(time.Millisecond)
		}
	}()
	require.ErrorIs(t, c.run(ctx), context.Canceled)
	text, err := os.ReadFile(filepath.Join(c.Out, "endurance.md"))
	require.NoError(t, err)
	require.Contains(t, string(text), "- FAILED: 2 producers, 14 B: ended early: context canceled")
	require.NotContains(t, string(text), "3 producers")
	text, err = os.ReadFile(filepath.Join(c.Out, "endurance-2p-14B.csv"))
	require.NoError(t, err)
	s, err := readSamples(text)
	require.NoError(t, err)
	require.NotEmpty(t, s)
	requireEmpty(t, c.Dir)
}

// TestCount: a task too few or too many is found.
func TestCount(t *testing.T) {
	q, err := codeq.Open(t.TempDir(), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	for range 4 {
		_, err := q.Produce(t.Context(), codeq.Task{Queue: workload.QueueName})
		require.NoError(t, err)
	}
	for created, missing := range map[int64]bool{0: true, 1: true, 2: false, 4: false, 7: false, 8: true} {
		r := &running{point: point{2, 3, 14}, created: created}
		err := r.count(workload.Start(t.Context(), workload.Load{}, idle{}), q, 1)
		require.Equal(t, missing, err != nil, "%d created: %v", created, err)
	}
}

// idle is a queue that takes no tasks.
type idle struct{}

func (idle) Produce(ctx context.Context, _, _ int, _ [][]byte) error {
	<-ctx.Done()
	return ctx.Err()
}

func (idle) Work(ctx context.Context, _ int, _ func([]byte)) error {
	<-ctx.Done()
	return nil
}

func TestFlags(t *testing.T) {
	parse := func(args ...string) (*config, error) {
		f := flag.NewFlagSet("endurance", flag.ContinueOnError)
		f.SetOutput(io.Discard)
		c := declare(f)
		return c, errors.Join(f.Parse(args), c.check())
	}
	c, err := parse("-for", "20s", "-producers", "1,3", "-payload", "100", "-durability", "disk")
	require.NoError(t, err)
	require.Equal(t, 20*time.Second, c.time)
	require.Equal(t, []int{1, 3}, c.producers)
	require.Equal(t, []int{100}, c.payloads)
	require.Equal(t, codeq.DurabilityDisk, c.durability)
	for _, bad := range [][]string{{"-payload", "9"}, {"-producers", "0"}, {"-producers", "two"}, {"-for", "1s"}, {"-durability", "paper"}} {
		_, err := parse(bad...)
		require.Error(t, err, "%v", bad)
	}
}

func requireEmpty(t *testing.T, dir string) {
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries)
}
