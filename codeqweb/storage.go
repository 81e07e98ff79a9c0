package codeqweb

import (
	"net/http"

	"codeq"
)

// storageView is the content of the page of storage.
type storageView struct {
	*codeq.StorageStats
	Disk, Dead, Debt, Linked int64
}

// storagePage shows the stores of this process, and the durations of their owners' upkeep.
func (d *Dashboard) storagePage(w http.ResponseWriter, r *request) error {
	stats, err := d.q.StorageStats()
	if err != nil {
		return err
	}
	v := storageView{StorageStats: stats}
	for i := range stats.Shards {
		s := &stats.Shards[i]
		v.Disk, v.Dead, v.Debt, v.Linked = v.Disk+s.DiskBytes, v.Dead+s.DeadBytes, v.Debt+s.CompactionDebt, v.Linked+s.LinkedBytes
	}
	return d.show(w, r, page{Title: "Storage", Screen: "storage", Refresh: 3, Body: v})
}
