package codeqweb

import (
	"bytes"
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testbase"
)

func info(name string, produced, completed, dead uint64) codeq.QueueInfo {
	return codeq.QueueInfo{
		Queue: name, Counts: codeq.Counts{Ready: 3, Dead: dead}, OldestReady: time.Unix(1000, 0),
		Totals: codeq.Totals{Produced: produced, Completed: completed, Dead: dead},
	}
}

// TestSamples: rates count from the previous sample; the first totals of a queue, and reset totals,
// do not count.
func TestSamples(t *testing.T) {
	first := newSample([]codeq.QueueInfo{info("a", 100, 90, 1), info("c", 5, 0, 0)}, &sample{}, time.Unix(2000, 0))
	second := newSample([]codeq.QueueInfo{info("a", 120, 100, 2), info("b", 1000, 0, 0), info("c", 2, 0, 0)}, first, time.Unix(2010, 0))
	require.InDelta(t, 2, second.row("a").Produced, 1e-9)
	require.InDelta(t, 1, second.row("a").Completed, 1e-9)
	require.InDelta(t, 0.1, second.row("a").Failed, 1e-9)
	require.Zero(t, second.row("b").Produced)
	require.Zero(t, second.row("c").Produced)
	require.Nil(t, second.row("nobody"))
	require.InDelta(t, 2, second.All.Produced, 1e-9)
	require.Equal(t, uint64(9), second.All.Counts.Ready)
	require.Equal(t, "a", second.All.Name, "with the oldest task")
	third := newSample([]codeq.QueueInfo{info("a", 121, 100, 2)}, second, time.Unix(2010, 1000))
	require.InDelta(t, 2, third.row("a").Produced, 1e-9, "a moment says little")
}

// TestSeries: each second and each minute has one point, and the oldest go.
func TestSeries(t *testing.T) {
	s := newSampler(nil, t.Context(), nil)
	last, produced := &sample{}, uint64(0)
	begin := time.Unix(1_000_000_020, 0).Truncate(time.Minute)
	const length = 49 * time.Hour / time.Second
	secondsKept, minutesKept := resolutions[bySecond].kept, resolutions[byMinute].kept
	for n := range int(length) {
		produced += 2
		next := newSample([]codeq.QueueInfo{info("a", produced, 0, 0)}, last, begin.Add(time.Duration(n)*time.Second))
		s.keep(next, last)
		last = next
	}
	for _, queue := range []string{"", "a"} {
		seconds, minutes := s.points(queue, bySecond), s.points(queue, byMinute)
		require.Len(t, seconds, secondsKept)
		require.Len(t, minutes, minutesKept)
		for i, p := range seconds {
			require.Equal(t, uint32(begin.Unix())+uint32(length)-uint32(secondsKept)+uint32(i), p.at)
			require.Equal(t, uint32(2), p.produced)
		}
		for i := range minutes[1:] {
			require.Equal(t, minutes[i].at+60, minutes[i+1].at)
			require.Equal(t, uint32(120), minutes[i+1].produced)
		}
		tens := s.points(queue, byTenMinutes)
		require.Len(t, tens, int(length/600)+1)
		require.Equal(t, uint32(1200), tens[9].produced)
	}
	require.Nil(t, s.points("nobody", bySecond))
}

// TestSamplerMemory: the memory is bounded for any time, and any number and names of queues.
func TestSamplerMemory(t *testing.T) {
	testbase.SkipUnderRace(t)
	s := newSampler(nil, t.Context(), nil)
	secondsKept, tensKept := resolutions[bySecond].kept, resolutions[byTenMinutes].kept
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	last := &sample{}
	func() {
		infos := make([]codeq.QueueInfo, 20_000)
		for n := range tensKept*10 + 10 {
			if n%5000 == 0 { // new strings, as in an answer
				for i := range infos {
					infos[i] = info(fmt.Sprintf("%06d%s", i, strings.Repeat("x", i%200)), uint64(n), 0, 0)
				}
			}
			use := infos
			if n > 2 && n < tensKept*10 {
				use = infos[:100]
			}
			next := newSample(use, last, time.Unix(int64(60*n), 0))
			s.keep(next, last)
			last = next
		}
		for i := range 200 { // viewers open other queues
			s.points(infos[i].Queue, byMinute)
		}
	}()
	for n := range secondsKept {
		next := newSample([]codeq.QueueInfo{info("a", 1, 1, 1)}, last, last.At.Add(time.Second))
		_ = n
		next.Rows, next.Queues = last.Rows, last.Queues
		s.keep(next, last)
		last = next
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	took := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	t.Log(took, "bytes")
	require.Len(t, s.queues, seriesQueues)
	require.Less(t, took, int64(14<<20)-maxRows*280, "with room for the next sample")
	runtime.KeepAlive(s)
}

// TestVisible: invisible characters become escapes.
func TestVisible(t *testing.T) {
	for text, want := range map[string]string{
		"plain":                      "plain",
		"größe 数 שלום":               "größe 数 שלום",
		"a\u202eb\u200fc\u2066":      `a\u202eb\u200fc\u2066`,
		"\xff\x00\x1b[31m\u0085":     `\xff\x00\x1b[31m\x85`,
		"line\nline\ttab\rreturn":    "line\nline\ttab\\x0dreturn",
		"\ufeff\U000e0001\u200b":     `\ufeff\U000e0001\u200b`,
		"👩\u200d👧 می\u200cخواهم":     "👩\u200d👧 می\u200cخواهم",
		"a\u200db\u200d\u200c\u200d": `a\u200db\u200d\u200c\u200d`,
		"👩\u200d\u200d👧\u200d":       `👩\u200d\u200d👧\u200d`,
		"a real \ufffd stays":        "a real \ufffd stays",
		"":                           "",
	} {
		require.Equal(t, want, visible(text))
	}
	require.Equal(t, "1,234,567", number(1234567))
	require.Equal(t, "-1,234", number(-1234))
	require.Equal(t, "12", number(12))
	require.Equal(t, "1.0 KiB", size(1024))
	require.Equal(t, "forever", span(codeq.Forever))
	require.Equal(t, "3 min", span(3*time.Minute))
	require.Equal(t, "aä…", clip("aäö", 4))
	for _, data := range []string{`{"a":[1,2,{"b\\\"[":[]}],"c":{}}`, `[[[[1]]]]`, `"[[["`, `1`} {
		var b bytes.Buffer
		require.NoError(t, json.Indent(&b, []byte(data), "", "  "))
		require.InDelta(t, b.Len(), indented([]byte(data)), 30, data)
	}
	deep := strings.Repeat("[", 9000) + strings.Repeat("]", 9000)
	require.Greater(t, indented([]byte(deep)), 100<<20)
}

// TestClockSetBack: after the clock was set back, the times of a chart still ascend, and earlier
// points stay.
func TestClockSetBack(t *testing.T) {
	s := newSampler(nil, t.Context(), nil)
	begin, last := time.Unix(1_000_000_020, 0).Truncate(time.Minute), &sample{}
	times := []int{}
	for n := range 400 {
		times = append(times, n)
	}
	for n := range 100 {
		times = append(times, 370+n)
	}
	for n, at := range times {
		next := newSample([]codeq.QueueInfo{info("a", uint64(n), 0, 0)}, last, begin.Add(time.Duration(at)*time.Second))
		s.keep(next, last)
		last = next
	}
	for in := range resolutions {
		points := s.points("a", resolution(in))
		for i := range points[1:] {
			require.Less(t, points[i].at, points[i+1].at)
		}
		require.LessOrEqual(t, points[0].at, uint32(begin.Unix())+200)
	}
}

// TestUnknownWorkers: a queue is not said to be without workers while a node does not say which
// ones it has.
func TestUnknownWorkers(t *testing.T) {
	for _, c := range []struct {
		knows   bool
		workers []codeq.WorkerInfo
		is      string
	}{
		{false, nil, ""},
		{true, []codeq.WorkerInfo{{Node: "n2", LastError: "no answer"}}, ""},
		{true, []codeq.WorkerInfo{{Queues: []string{"a"}}}, ""},
		{true, nil, "no worker takes its tasks"},
	} {
		s := sample{At: time.Unix(2000, 0), Rows: []row{{Name: "a", Counts: codeq.Counts{Ready: 1}, Oldest: time.Unix(1999, 0)}}, Workers: c.workers, knowsWorkers: c.knows}
		s.judge()
		require.Equal(t, c.is, s.Rows[0].Trouble.String())
	}
}
