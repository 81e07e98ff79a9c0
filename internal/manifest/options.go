package manifest

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"codeq/internal/base"
)

// Options has the options about tasks from the application's last Open. A tool uses them when it
// opens the queue between two processes of the application.
type Options struct {
	Durability   string        `json:"durability"` // as text
	LeaseFor     time.Duration `json:"leaseFor"`
	MaxAttempts  int           `json:"maxAttempts"`
	Backoff      base.Backoff  `json:"backoff"`
	Retention    time.Duration `json:"retention"`
	Limits       Limits        `json:"limits"`
	MinFreeBytes int64         `json:"minFreeBytes"`
}

// Limits is codeq.Limits.
type Limits struct {
	Payload     int `json:"payload"`
	Headers     int `json:"headers"`
	Name        int `json:"name"`
	Batch       int `json:"batch"`
	BatchBytes  int `json:"batchBytes"`
	Parents     int `json:"parents"`
	CommitBytes int `json:"commitBytes"`
}

// CheckTool refuses a directory of an older format: only its application upgrades it.
func (m *Manifest) CheckTool() error {
	if m.Format < Format {
		return fmt.Errorf("%w: %d: its application must upgrade it to %d first", base.ErrFormat, m.Format, Format)
	}
	return nil
}

// The bounds of leases.
const (
	MaxLease = 365 * 24 * time.Hour
	MinLease = 10 * time.Millisecond
)

// SetDefaults sets the fields that are zero, except MinFreeBytes; its default depends on others. It
// returns a field that is out of bounds, with its value and the limit; "": there is none.
// maxParents and maxCommit bound the parents and bytes of a batch.
func (o *Options) SetDefaults(maxParents, maxCommit int) (field string, value any, limit string) {
	l := &o.Limits
	for _, f := range []struct {
		name          string
		value         *int
		low, def, max int
	}{
		{"MaxAttempts", &o.MaxAttempts, 1, 25, math.MaxInt32},
		{"Limits.Payload", &l.Payload, 1, 1 << 20, 64 << 20},
		{"Limits.Headers", &l.Headers, 1, 16 << 10, 1 << 20},
		{"Limits.Name", &l.Name, 1, 255, 4096},
		{"Limits.Batch", &l.Batch, 1, 10_000, 1 << 20},
		{"Limits.BatchBytes", &l.BatchBytes, 1, 16 << 20, 256 << 20},
		{"Limits.Parents", &l.Parents, 1, 100_000, maxParents},
		{"Limits.CommitBytes", &l.CommitBytes, 1, 0, maxCommit},
	} {
		if *f.value == 0 {
			*f.value = f.def
		} else if *f.value < f.low || *f.value > f.max {
			return f.name, *f.value, fmt.Sprintf("%d to %d", f.low, f.max)
		}
	}
	if l.CommitBytes == 0 {
		l.CommitBytes = max(32<<20, 2*l.BatchBytes, 4*l.Payload)
	}
	switch o.LeaseFor = cmp.Or(o.LeaseFor, 30*time.Second); {
	case o.LeaseFor < MinLease || o.LeaseFor > MaxLease:
		return "LeaseFor", o.LeaseFor, fmt.Sprint(MinLease, " to ", MaxLease)
	case o.Retention < 0 && o.Retention != forever:
		return "Retention", o.Retention, "0 or more, or Forever"
	}
	field, value, limit = o.Backoff.SetDefaults()
	return "Backoff" + field, value, limit
}

// forever is a retention without end.
const forever time.Duration = -1

// NewShards is the default of a new directory, on a machine with so many processors. synced: each
// commit is forced to the disk.
func NewShards(cluster, synced bool, procs int) int {
	switch {
	case cluster:
		return 3 // on machines of any size
	case synced: // each shard syncs a log of its own, for the fewer callers
		procs = (procs + 1) / 2
	}
	return min((procs+2)/3, 8)
}
