package simtest

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// WallClock is the wall clock of a machine. It can be set, and drifts.
type WallClock struct {
	began time.Time    // start of the drift
	ahead atomic.Int64 // ns
	drift atomic.Int64 // parts per million
}

func (c *WallClock) begin() { c.began = time.Now() }

func (c *WallClock) Now() time.Time {
	now := time.Now()
	drift := now.Sub(c.began).Microseconds() * c.drift.Load() // ns: 1e6 ppm, 1e3 ns a microsecond
	return now.Add(time.Duration(c.ahead.Load() + drift/1000))
}

// Set sets how far the clock is ahead of time, without its drift, and reports whether that is a
// change.
func (c *WallClock) Set(ahead time.Duration) bool { return c.ahead.Swap(int64(ahead)) != int64(ahead) }

// Drift sets the drift of the clock since its start, in parts per million.
func (c *WallClock) Drift(ppm int64) { c.drift.Store(ppm) }

// MaxRate is by how much a monotonic clock is faster or slower than time at the most, in parts per
// million. DrawRate draws at least a fifth of it.
const MaxRate = 50_000

// DrawRate draws the rate of a monotonic clock, in parts per million more than time.
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
	shows time.Time // the clock's value at that time
	ppm   int64     // gain since then, in parts per million
}

func (c *MonoClock) begin() { c.at, c.shows = time.Now(), time.Now() }

// Run sets the gain of the clock from now on, in parts per million.
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
