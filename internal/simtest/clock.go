package simtest

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// WallClock is the wall clock of a machine. It can be set, and drifts.
type WallClock struct {
	began time.Time    // the drift counts from then on
	ahead atomic.Int64 // ns
	drift atomic.Int64 // parts per million
}

func (c *WallClock) begin() { c.began = time.Now() }

func (c *WallClock) Now() time.Time {
	now := time.Now()
	drift := now.Sub(c.began).Microseconds() * c.drift.Load() // ns: 1e6 ppm, 1e3 ns a microsecond
	return now.Add(time.Duration(c.ahead.Load() + drift/1000))
}

// Set lets the clock be ahead of time, beside its drift, and reports whether that is new.
func (c *WallClock) Set(ahead time.Duration) bool { return c.ahead.Swap(int64(ahead)) != int64(ahead) }

// Drift lets the clock gain so many parts per million, since the machine was made.
func (c *WallClock) Drift(ppm int64) { c.drift.Store(ppm) }

// MaxRate is by how much a monotonic clock is faster or slower than time at the most, in parts per
// million. DrawRate gives it a fifth of that at least.
const MaxRate = 50_000

// DrawRate draws what a monotonic clock gains, in parts per million.
func DrawRate(rng *rand.Rand) (ppm int64) {
	ppm = MaxRate/5 + rng.Int64N(MaxRate*4/5+1)
	if rng.IntN(2) == 0 {
		return -ppm
	}
	return ppm
}

// MonoClock is the monotonic clock of a machine.
type MonoClock struct {
	mu    sync.Mutex // guards the fields below
	at    time.Time
	shows time.Time // it did at that time
	ppm   int64     // by which it gains since then
}

func (c *MonoClock) begin() { c.at, c.shows = time.Now(), time.Now() }

// Run lets the clock gain so many parts per million from now on.
func (c *MonoClock) Run(ppm int64) {
	now := c.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at, c.shows, c.ppm = time.Now(), now, ppm
}

func (c *MonoClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := time.Since(c.at)
	return c.shows.Add(d + time.Duration(d.Microseconds()*c.ppm/1000)) // ns: 1e6 ppm, 1e3 ns a us
}
