package permits

import (
	"math"
	"time"
)

// tokenBucket is a token bucket. A permit contains a token. The token counts against the bucket's
// capacity until the shard has reported its use: so claims keep to the rate even if permits and
// reports are delayed.
//
// Invariant: level + out <= burst, or level is 0.
type tokenBucket struct {
	rate  float64 // tokens a second; 0: no limit
	burst int
	level float64
	out   int       // tokens of unused permits
	at    time.Time // tokens were added up to this time; zero: none yet
}

// start adds tokens from now on.
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

// count returns the number of tokens in the bucket.
func (b *tokenBucket) count(now time.Time) int {
	if b.rate == 0 {
		return math.MaxInt
	}
	b.advance(now)
	return int(b.level + 1e-9)
}

// take moves n tokens to permits.
func (b *tokenBucket) take(n int) {
	b.level -= float64(n)
	b.out += n
	b.clip()
}

// longestWait bounds the result of wait, since a rate may be tiny.
const longestWait = time.Hour

// wait returns the time until there is a token; 0 if only a report can bring one.
func (b *tokenBucket) wait() time.Duration {
	if b.out >= b.burst {
		return 0
	}
	seconds := min(max(1-b.level, 0)/b.rate, longestWait.Seconds())
	return time.Duration(math.Ceil(seconds * float64(time.Second)))
}

// set changes the limit. The bucket is full if it had no rate and noRateBefore is set; otherwise
// it is not known how many tokens were used.
func (b *tokenBucket) set(l *Limits, noRateBefore bool, now time.Time) {
	b.advance(now)
	if b.rate == 0 {
		b.level = 0
		if noRateBefore {
			b.level = float64(l.Burst)
		}
	}
	b.rate, b.burst = l.Rate, l.Burst
	b.clip()
}
