package codeqweb

import (
	"context"
	"net/http"

	"codeq"
)

// storageView is the content of the page of storage.
type storageView struct {
	*codeq.StorageStats
	Disk, Dead, Debt, Linked int64
	Frees                    int64 // of Dead, what compactions free soon
	Usage                    *usage
	UsageError               string // why Usage is nil
}

// LowDisk reports whether less is free than twice the limit.
func (v storageView) LowDisk() bool { return v.FreeBytes >= 0 && v.FreeBytes/2 < v.MinFreeBytes }

// Compactions leave some of a shard's dead bytes: see codeq.ShardStorage.
const (
	deadLeft     = 8 << 20 // bytes
	deadLeftPart = 16      // the part of the tables that is left besides
)

// storagePage shows the stores of this process, what takes the disk and what will be free when, and
// the durations of the upkeep.
func (d *Dashboard) storagePage(w http.ResponseWriter, r *request) error {
	stats, err := d.q.StorageStats()
	if err != nil {
		return err
	}
	v := storageView{StorageStats: stats}
	for i := range stats.Shards {
		s := &stats.Shards[i]
		v.Disk, v.Dead, v.Debt, v.Linked = v.Disk+s.DiskBytes, v.Dead+s.DeadBytes, v.Debt+s.CompactionDebt, v.Linked+s.LinkedBytes
		v.Frees += max(0, s.DeadBytes-deadLeft-s.TableBytes/deadLeftPart)
	}
	if v.Usage, err = d.usage.get(r.Context()); err != nil {
		v.UsageError = err.Error()
	}
	return d.show(w, r, page{Title: "Storage", Screen: "storage", Refresh: 3, Body: v})
}

func (d *Dashboard) apiStorage(context.Context, *request) (any, error) { return d.q.StorageStats() }

func (d *Dashboard) apiUsage(ctx context.Context, _ *request) (any, error) { return d.usage.get(ctx) }
