package permits

import (
	"math"
	"time"
)

// tokenBucket is a token bucket. A permit takes a token along, for which there is no room in the
// bucket until the shard has told that it has used it: so the claims keep to the rate, however long
// permits and reports are on their way.
//
// Invariant: level + out <= burst, or level is 0.
type tokenBucket struct {
	rate  float64 // tokens a second; 0: no limit
	burst int
	level float64
	out   int       // tokens of unused permits
	at    time.Time // until when tokens have come; zero: none come yet
}

// start makes tokens come from now on.
func (b *tokenBucket) start(now time.Time) { b.at = now }

func (b *tokenBucket) advance(now time.Time) {
	if b.at.IsZero() {
		return
	}
	b.level += b.rate * now.Sub(b.at).Seconds()
	b.at = now
	b.clip()
}

func (b *tokenBucket) clip() { b.level = max(0, min(b.level, float64(b.burst-b.out))) }

// count is how many there are.
func (b *tokenBucket) count(now time.Time) int {
	if b.rate == 0 {
		return math.MaxInt
	}
	b.advance(now)
	return int(b.level + 1e-9)
}

// take takes n tokens along.
func (b *tokenBucket) take(n int) {
	b.level -= float64(n)
	b.out += n
	b.clip()
}

// longestWait bounds what wait returns, since a rate may be next to nothing.
const longestWait = time.Hour

// wait is how long until there is a token; 0 if that is for a report to tell.
func (b *tokenBucket) wait() time.Duration {
	if b.out >= b.burst {
		return 0
	}
	seconds := min(max(1-b.level, 0)/b.rate, longestWait.Seconds())
	return time.Duration(math.Ceil(seconds * float64(time.Second)))
}

// set changes the limit. The bucket is full if there was no rate before and that is fresh: else it
// is not known what was spent.
func (b *tokenBucket) set(l *Limits, fresh bool, now time.Time) {
	b.advance(now)
	if b.rate == 0 {
		b.level = 0
		if fresh {
			b.level = float64(l.Burst)
		}
	}
	b.rate, b.burst = l.Rate, l.Burst
	b.clip()
}
