package endurance

import (
	"fmt"

	"codeq/bench/report/internal/document"
)

// Limits of a verdict.
const (
	slowest = 0.9  // last tenth to second tenth
	largest = 1.25 // later to earlier; plus a slack

	// Memory that the garbage collector has not returned yet.
	memorySlack = 16 << 20
	// Logs and tables of the maximum number of memtables.
	diskSlack = 64 << 20

	// shortest is the minimum length of a judged point, in seconds.
	shortest = 100
)

// tenth is a tenth of the time of a point.
type tenth struct {
	samples []sample
	seconds float64
	cycles  float64
}

func (t tenth) rate() float64 { return t.cycles / t.seconds }

// tenths divides samples by the times of their middles.
func tenths(samples []sample) (all [10]tenth) {
	if len(samples) == 0 {
		return all
	}
	total := samples[len(samples)-1].Seconds
	for _, s := range samples {
		t := &all[min(max(int(10*(s.Seconds-s.Interval/2)/total), 0), 9)]
		t.samples = append(t.samples, s)
		t.seconds += s.Interval
		t.cycles += s.Completed
	}
	return all
}

// verdict says whether a point kept a promise.
type verdict struct {
	failed bool
	text   string
}

func (v verdict) String() string {
	if v.failed {
		return "FAILED: " + v.text
	}
	return v.text
}

// judge compares the samples of a point with the promises.
func judge(p point, samples []sample) []verdict {
	all := tenths(samples)
	second, last := all[1], all[9]
	if len(samples) == 0 || samples[len(samples)-1].Seconds < shortest {
		return []verdict{{false, fmt.Sprintf("%v: not judged: less than %d s", p, shortest)}}
	}
	ratio := last.rate() / second.rate()
	return []verdict{
		{!(ratio >= slowest), fmt.Sprintf("%v: the last tenth is at %.2f of the second tenth (%s and %s cycles/s); at least %.2f",
			p, ratio, document.Number(last.rate()), document.Number(second.rate()), slowest)},
		bounded(fmt.Sprintf("%v: memory", p), samples, func(s *sample) float64 { return s.Resident }, memorySlack),
		bounded(fmt.Sprintf("%v: disk", p), samples, func(s *sample) float64 { return s.Disk }, diskSlack),
	}
}

// bounded compares the maxima of two equally long intervals: of the second half of each life of the
// queue with its first half, to find growth while the queue is open, and of the second life with
// the first, to find growth over a restart. Growth with time, or with its square root, fails.
func bounded(what string, samples []sample, value func(*sample) float64, slack float64) verdict {
	var lives [2][]sample
	for _, s := range samples {
		life := &lives[int(s.Life)-1]
		*life = append(*life, s)
	}
	v := verdict{text: what + " is bounded"}
	worst := -1.0
	compare := func(stretch string, earlier, later []sample) {
		if len(earlier) == 0 || len(later) == 0 {
			return
		}
		before, after := most(earlier, value), most(later, value)
		limit := largest*before + slack
		if after/limit <= worst {
			return
		}
		worst = after / limit
		text := fmt.Sprintf("%s: at most %s in %s, after %s", what, document.Bytes(int64(after)), stretch, document.Bytes(int64(before)))
		v = verdict{after > limit, fmt.Sprintf("%s; at most %.2f times that and %s", text, largest, document.Bytes(int64(slack)))}
	}
	for i, life := range lives {
		compare(fmt.Sprintf("the second half of the %s life", [2]string{"first", "second"}[i]), life[:len(life)/2], life[len(life)/2:])
	}
	compare("the second life", lives[0], lives[1])
	return v
}

func most(samples []sample, value func(*sample) float64) (most float64) {
	for i := range samples {
		most = max(most, value(&samples[i]))
	}
	return most
}
