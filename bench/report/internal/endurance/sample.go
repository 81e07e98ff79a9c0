package endurance

import (
	"bytes"
	"encoding/csv"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime/metrics"
	"strconv"
	"syscall"
	"time"

	"github.com/jszwec/csvutil"
	"github.com/prometheus/procfs"

	"codeq"
	"codeq/bench/workload"
)

// sample is one row: an interval of about a second. Fields called "now" are of its end, the others
// count within it.
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
	Steal     float64 `csv:"steal_ms"`   // processor time that the host gave to other machines
	Resident  float64 `csv:"resident_b"` // now
	Heap      float64 `csv:"heap_b"`     // now: objects on Go's heap, garbage included
	Read      float64 `csv:"read_b"`     // by system calls
	Written   float64 `csv:"written_b"`
	Reads     float64 `csv:"read_calls"`
	Writes    float64 `csv:"write_calls"`
	DiskRead  float64 `csv:"disk_read_b"` // by the device
	DiskWrite float64 `csv:"disk_written_b"`
	Disk      float64 `csv:"disk_b"` // now: allocated to the files of the queue

	Tables      float64 `csv:"tables"` // now: this one and the next ones, of all shards
	TableBytes  float64 `csv:"table_b"`
	L0Tables    float64 `csv:"l0_tables"` // this one and the next: the maximum of all shards
	ReadAmp     float64 `csv:"read_amp"`
	Debt        float64 `csv:"compaction_debt_b"`
	MemTables   float64 `csv:"memtable_b"`
	Log         float64 `csv:"log_b"`
	Flushes     float64 `csv:"flushes"` // since the queue was opened: this one and the next ones
	Compactions float64 `csv:"compactions"`
	Logged      float64 `csv:"logged_b"`
	Flushed     float64 `csv:"flushed_b"`
	Compacted   float64 `csv:"compacted_b"`
	CacheHits   float64 `csv:"cache_hits"`
	CacheMisses float64 `csv:"cache_misses"`
}

// writeAmp returns the bytes that the stores have written for each byte of the log.
func (s *sample) writeAmp() float64 {
	if s.Logged == 0 {
		return math.NaN()
	}
	return (s.Logged + s.Flushed + s.Compacted) / s.Logged
}

// newEncoder returns an encoder of samples, with at most six decimals.
func newEncoder(w csvutil.Writer) *csvutil.Encoder {
	e := csvutil.NewEncoder(w)
	e.WithMarshalers(csvutil.MarshalFunc(func(x float64) ([]byte, error) {
		return strconv.AppendFloat(nil, math.Round(x*1e6)/1e6, 'f', -1, 64), nil
	}))
	return e
}

// readSamples reads the rows of newEncoder.
func readSamples(text []byte) (all []sample, err error) {
	d, err := csvutil.NewDecoder(csv.NewReader(bytes.NewReader(text)))
	if err != nil {
		return nil, err
	}
	d.DisallowMissingColumns = true
	return all, d.Decode(&all)
}

// gauge has the counts of the load, the process and the machine since their start.
type gauge struct {
	at                 time.Time
	created, completed int64
	cpu, steal         time.Duration
	io                 procfs.ProcIO
}

func readGauge(run *workload.Run) (g gauge, err error) {
	g.at, g.cpu = time.Now(), workload.ReadUsage().CPU
	if g.created, g.completed, err = run.Counts(); err != nil {
		return g, err
	}
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return g, err
	}
	self, err := proc.Self()
	if err != nil {
		return g, err
	}
	if g.io, err = self.IO(); err != nil {
		return g, err
	}
	machine, err := proc.Stat()
	g.steal = time.Duration(machine.CPUTotal.Steal * float64(time.Second))
	return g, err
}

// used sets the difference of two gauges.
func (s *sample) used(before, after gauge) {
	s.Interval = after.at.Sub(before.at).Seconds()
	s.Created, s.Completed = float64(after.created-before.created), float64(after.completed-before.completed)
	s.Rate = s.Completed / s.Interval
	s.CPU, s.Steal = milliseconds(after.cpu-before.cpu), milliseconds(after.steal-before.steal)
	s.Read, s.Written = float64(after.io.RChar-before.io.RChar), float64(after.io.WChar-before.io.WChar)
	s.Reads, s.Writes = float64(after.io.SyscR-before.io.SyscR), float64(after.io.SyscW-before.io.SyscW)
	s.DiskRead, s.DiskWrite = float64(after.io.ReadBytes-before.io.ReadBytes), float64(after.io.WriteBytes-before.io.WriteBytes)
	s.Resident = float64(workload.Resident())
	heap := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(heap)
	s.Heap = float64(heap[0].Value.Uint64())
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// stores sets the statistics of the stores.
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

// allocated returns the disk space of the files below dir, in bytes.
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
