package base

import (
	"fmt"
	"math"
	"time"
)

// Backoff is the wait between two attempts, as codeq.Backoff describes it.
type Backoff struct {
	Base   time.Duration `json:"base"`
	Max    time.Duration `json:"max"`
	Factor float64       `json:"factor"`
	Step   time.Duration `json:"step,omitzero"`
	Jitter float64       `json:"jitter"`
}

// SetDefaults sets the fields that are zero, and makes all finite. It returns the field that is out
// of bounds, with its value and the allowed values; "": none is.
func (b *Backoff) SetDefaults() (field string, value any, limit string) {
	if b.Base == 0 {
		b.Base = time.Second
	}
	if b.Max == 0 {
		b.Max = max(time.Hour, b.Base)
	}
	if b.Factor == 0 {
		if b.Factor = 2; b.Step != 0 {
			b.Factor = 1
		}
	}
	if b.Jitter == 0 {
		b.Jitter = 0.2
	}
	switch {
	case b.Base < 0 || b.Max < b.Base:
		return "", fmt.Sprintf("Base %v, Max %v", b.Base, b.Max), "0 < Base <= Max"
	case b.Factor < 1 || math.IsNaN(b.Factor):
		return ".Factor", b.Factor, "1 or more"
	case b.Step < 0:
		return ".Step", b.Step, "0 or more"
	case b.Jitter > 1 || math.IsNaN(b.Jitter):
		return ".Jitter", b.Jitter, "at most 1"
	}
	b.Factor, b.Jitter = min(b.Factor, math.MaxFloat64), max(b.Jitter, -1)
	return "", nil, ""
}

// Delay returns the wait after an attempt (1 is the first). chance is a random number in [0, 1)
// that decides the jitter.
func (b *Backoff) Delay(attempt int, chance float64) time.Duration {
	earlier := float64(max(attempt, 1) - 1)
	d := float64(b.Base)*math.Pow(b.Factor, earlier) + float64(b.Step)*earlier
	d = min(d, float64(b.Max))
	if b.Jitter > 0 {
		d *= 1 + b.Jitter*(2*chance-1)
	}
	if d >= math.MaxInt64 {
		return math.MaxInt64
	}
	return time.Duration(d)
}
