package codeqweb

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"codeq"
)

// The overview begins with the queues in trouble. A queue is compared with itself: a wait of a
// minute is normal for one, and a disaster for another.

// normal has the moving averages of a queue.
type normal struct {
	wait      float32 // of the oldest ready task, in seconds, over usualFor
	watched   float32 // for how long, in seconds, up to usualFor
	completed float32 // a second, over recently
	failed    float32 // likewise
	calm      float32 // since the last failure, in seconds
	failing   bool    // it is in trouble by its failures
}

const (
	usualFor = 6 * 60 * 60 // seconds
	recently = 60          // seconds
	knownFor = 10 * 60     // seconds: until then, no wait is usual
)

// after returns the averages after an interval that ended with r.
func (n normal) after(r *row, now time.Time, seconds float64) normal {
	if seconds <= 0 {
		return n
	}
	n.watched = min(n.watched+float32(seconds), usualFor)
	n.wait += (float32(r.wait(now).Seconds()) - n.wait) * float32(min(1, seconds/float64(n.watched)))
	part := float32(1 - math.Exp(-seconds/recently))
	n.completed += (float32(r.Completed) - n.completed) * part
	n.failed += (float32(r.Failed) - n.failed) * part
	if n.calm += float32(seconds); r.Failed > 0 {
		n.calm = 0
	}
	from := float32(failingFrom)
	if n.failing {
		from = failingUntil
	}
	n.failing = n.share() >= failingShare && n.failed >= from && n.calm < calmFrom
	return n
}

// share returns the part of the last attempts that failed.
func (n *normal) share() float64 {
	return float64(n.failed / max(n.failed+n.completed, math.SmallestNonzeroFloat32))
}

// wait returns how long the oldest ready task waits; 0: none does.
func (r *row) wait(now time.Time) time.Duration {
	if r.Oldest.IsZero() {
		return 0
	}
	return max(0, now.Sub(r.Oldest))
}

// Usual is the usual wait of a queue, as text.
func (r *row) Usual() string {
	if r.normal.watched < knownFor {
		return "–"
	}
	return span(time.Duration(r.normal.wait) * time.Second)
}

// trouble has the faults of a queue, in words.
type trouble struct {
	Words []string // the worst first; none: nothing is
	worst float64
}

func (t *trouble) add(worst float64, format string, args ...any) {
	words := fmt.Sprintf(format, args...)
	if worst > t.worst {
		t.worst, t.Words = worst, slices.Insert(t.Words, 0, words)
		return
	}
	t.Words = append(t.Words, words)
}

// String is empty if nothing is wrong.
func (t trouble) String() string { return strings.Join(t.Words, "; ") }

// The bounds of trouble.
const (
	behindFrom   = 30 * time.Second // a shorter wait is never behind
	behindTimes  = 3                // as long as usual
	unknownFrom  = 5 * time.Minute  // a wait of a queue that has not been watched for long
	failingShare = 0.05
	failingFrom  = 0.02            // a second
	failingUntil = failingFrom / 4 // else a slow queue would leave trouble before each failure
	calmFrom     = 120             // seconds without a failure
)

// troubleOf returns the faults of a queue at a time. worked: a Run claims from it, or may.
func troubleOf(r *row, now time.Time, worked bool) (t trouble) {
	wait, n := r.wait(now), &r.normal
	usual := time.Duration(float64(n.wait) * float64(time.Second))
	switch waiting := r.Counts.Ready; {
	case waiting == 0:
	case r.Paused:
		t.add(2+math.Log10(float64(waiting))/10, "paused while %s wait", number(waiting))
	case !worked && r.Counts.Leased == 0 && n.completed < 0.001:
		t.add(4+math.Log10(float64(waiting))/10, "no worker takes its tasks")
	case n.watched < knownFor && wait > unknownFrom:
		t.add(2, "the oldest waits %s", span(wait))
	case n.watched >= knownFor && wait > behindFrom && wait > behindTimes*usual:
		t.add(2+math.Log2(wait.Seconds()/max(1, usual.Seconds()))/4, "behind: the oldest waits %s, usually %s", span(wait), span(usual.Round(time.Second)))
	}
	if n.failing {
		t.add(1+3*n.share(), "%.0f %% of its last attempts failed", 100*n.share())
	}
	if r.Held > 0 {
		t.add(0.5, "%s handlers hold places after the end of their tasks", number(r.Held))
	}
	return t
}

// compareTrouble orders queues, the worst first.
func compareTrouble(a, b *row) int {
	return cmp.Or(cmp.Compare(b.Trouble.worst, a.Trouble.worst), compareOldest(a.Oldest, b.Oldest), cmp.Compare(b.Counts.Ready, a.Counts.Ready))
}

// workedOn returns the queues that a Run claims from. all: a node has not said which ones.
func workedOn(workers []codeq.WorkerInfo) (worked map[string]bool, all bool) {
	worked = make(map[string]bool)
	for i := range workers {
		all = all || workers[i].LastError != ""
		for _, queue := range workers[i].Queues {
			worked[queue] = true
		}
	}
	return worked, all
}
