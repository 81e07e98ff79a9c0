package main

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"runtime/metrics"
	"strconv"
	"syscall"
	"time"

	"codeq"
	"codeq/bench/workload"
)

// sample is one row: an interval of about a second. What is called "now" is of
// its end, all else is what the interval has added.
type sample struct {
	Seconds  float64 `csv:"seconds"`  // now: of work since the point began
	Interval float64 `csv:"interval"` // seconds
	Life     float64 `csv:"life"`     // 1 before the queue was reopened, 2 after

	Created   float64 `csv:"created"`
	Completed float64 `csv:"completed"` // the cycles
	Rate      float64 `csv:"cycles_per_s"`
	MiB80     float64 `csv:"s_per_80_mib"` // seconds for so many payloads

	P50 float64 `csv:"p50_us"`
	P90 float64 `csv:"p90_us"`
	P99 float64 `csv:"p99_us"`
	Max float64 `csv:"max_us"`

	CPU       float64 `csv:"cpu_ms"`
	Steal     float64 `csv:"steal_ms"`   // processor time of the machine that its host gave to others
	Resident  float64 `csv:"resident_b"` // now
	Heap      float64 `csv:"heap_b"`     // now: objects on Go's heap, garbage included
	Read      float64 `csv:"read_b"`     // by system calls
	Written   float64 `csv:"written_b"`
	Reads     float64 `csv:"read_calls"`
	Writes    float64 `csv:"write_calls"`
	DiskRead  float64 `csv:"disk_read_b"` // by the device
	DiskWrite float64 `csv:"disk_written_b"`
	Disk      float64 `csv:"disk_b"` // now: allocated to the files of the queue

	Tables      float64 `csv:"tables"` // this and what follows is now, and of all shards
	TableBytes  float64 `csv:"table_b"`
	L0Tables    float64 `csv:"l0_tables"` // this one and the next: the largest of a shard
	ReadAmp     float64 `csv:"read_amp"`
	Debt        float64 `csv:"compaction_debt_b"`
	MemTables   float64 `csv:"memtable_b"`
	Log         float64 `csv:"log_b"`
	Flushes     float64 `csv:"flushes"` // this and what follows since the queue was opened
	Compactions float64 `csv:"compactions"`
	Logged      float64 `csv:"logged_b"`
	Flushed     float64 `csv:"flushed_b"`
	Compacted   float64 `csv:"compacted_b"`
	CacheHits   float64 `csv:"cache_hits"`
	CacheMisses float64 `csv:"cache_misses"`
}

// writeAmp is how many bytes the stores have written for one of the log.
func (s *sample) writeAmp() float64 {
	if s.Logged == 0 {
		return math.NaN()
	}
	return (s.Logged + s.Flushed + s.Compacted) / s.Logged
}

// columns are the names of the fields of a sample.
func columns() []string {
	t := reflect.TypeFor[sample]()
	names := make([]string, t.NumField())
	for i := range names {
		names[i] = t.Field(i).Tag.Get("csv")
	}
	return names
}

func (s *sample) row() []string {
	v := reflect.ValueOf(s).Elem()
	cells := make([]string, v.NumField())
	for i := range cells {
		cells[i] = strconv.FormatFloat(math.Round(v.Field(i).Float()*1e6)/1e6, 'f', -1, 64)
	}
	return cells
}

// readSamples reads what a csv.Writer has made of columns and rows.
func readSamples(text []byte) ([]sample, error) {
	rows, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil {
		return nil, err
	}
	var all []sample
	for n, row := range rows {
		if n == 0 {
			if !reflect.DeepEqual(row, columns()) {
				return nil, fmt.Errorf("columns %v, not those of a sample", row)
			}
			continue
		}
		var s sample
		v := reflect.ValueOf(&s).Elem()
		for i, cell := range row {
			x, err := strconv.ParseFloat(cell, 64)
			if err != nil {
				return nil, fmt.Errorf("row %d: %w", n, err)
			}
			v.Field(i).SetFloat(x)
		}
		all = append(all, s)
	}
	return all, nil
}

// gauge reads what the process and the machine have used since they began.
type gauge struct {
	at                                                  time.Time
	cpu, steal                                          time.Duration
	read, written, reads, writes, diskRead, diskWritten float64
}

func readGauge() (g gauge, err error) {
	g.at, g.cpu = time.Now(), workload.ReadUsage().CPU
	io, err := os.ReadFile("/proc/self/io")
	if err != nil {
		return g, err
	}
	_, err = fmt.Sscanf(string(io), "rchar: %g\nwchar: %g\nsyscr: %g\nsyscw: %g\nread_bytes: %g\nwrite_bytes: %g\n",
		&g.read, &g.written, &g.reads, &g.writes, &g.diskRead, &g.diskWritten)
	if err != nil {
		return g, fmt.Errorf("/proc/self/io: %w", err)
	}
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return g, err
	}
	var ticks [8]int64 // of 10 ms: user, nice, system, idle, iowait, irq, softirq, steal
	_, err = fmt.Sscanf(string(stat), "cpu %d %d %d %d %d %d %d %d",
		&ticks[0], &ticks[1], &ticks[2], &ticks[3], &ticks[4], &ticks[5], &ticks[6], &ticks[7])
	if err != nil {
		return g, fmt.Errorf("/proc/stat: %w", err)
	}
	g.steal = time.Duration(ticks[7]) * 10 * time.Millisecond
	return g, nil
}

// used fills in what was used between two gauges.
func (s *sample) used(before, after gauge) {
	s.Interval = after.at.Sub(before.at).Seconds()
	s.CPU, s.Steal = milliseconds(after.cpu-before.cpu), milliseconds(after.steal-before.steal)
	s.Read, s.Written = after.read-before.read, after.written-before.written
	s.Reads, s.Writes = after.reads-before.reads, after.writes-before.writes
	s.DiskRead, s.DiskWrite = after.diskRead-before.diskRead, after.diskWritten-before.diskWritten
	s.Resident = float64(workload.Resident())
	heap := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(heap)
	s.Heap = float64(heap[0].Value.Uint64())
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// stores fills in what the stores of a queue say.
func (s *sample) stores(st *codeq.StorageStats) {
	for _, shard := range st.Shards {
		s.Tables += float64(shard.Tables)
		s.TableBytes += float64(shard.TableBytes)
		s.L0Tables = max(s.L0Tables, float64(shard.L0Tables))
		s.ReadAmp = max(s.ReadAmp, float64(shard.ReadAmp))
		s.Debt += float64(shard.CompactionDebt)
		s.MemTables += float64(shard.MemTableBytes)
		s.Log += float64(shard.LogBytes)
		s.Flushes += float64(shard.Flushes)
		s.Compactions += float64(shard.Compactions)
		s.Logged += float64(shard.LoggedBytes)
		s.Flushed += float64(shard.FlushedBytes)
		s.Compacted += float64(shard.CompactedBytes)
	}
	s.CacheHits, s.CacheMisses = float64(st.CacheHits), float64(st.CacheMisses)
}

// allocated is what the files below dir take on disk, in bytes.
func allocated(dir string) (float64, error) {
	var blocks int64
	err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			var info fs.FileInfo
			if info, err = e.Info(); err == nil {
				blocks += info.Sys().(*syscall.Stat_t).Blocks
			}
		}
		if os.IsNotExist(err) { // deleted meanwhile
			return nil
		}
		return err
	})
	return float64(blocks) * 512, err
}
