package main

import (
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/perf/benchfmt"
)

// measures are the values that benchmarks have reported, by their name without
// the number of processors, and by unit.
type measures map[string]map[string][]float64

var procs = regexp.MustCompile(`-\d+$`)

// parse adds what go test has printed, with a prefix to all names.
func (m measures) parse(prefix, printed string) error {
	if err := m.parseKills(printed); err != nil {
		return err
	}
	r := benchfmt.NewReader(strings.NewReader(printed), "go test")
	for r.Scan() {
		res, ok := r.Result().(*benchfmt.Result)
		if !ok {
			continue // a line that is not of a benchmark
		}
		name := prefix + procs.ReplaceAllString(string(res.Name.Full()), "")
		if m[name] == nil {
			m[name] = make(map[string][]float64)
		}
		for _, v := range res.Values {
			value, unit := v.Value, v.Unit
			if v.OrigUnit != "" {
				value, unit = v.OrigValue, v.OrigUnit
			}
			m[name][unit] = append(m[name][unit], value)
		}
	}
	return r.Err()
}

// killed is what TestClusterKill logs of a level at its end.
var killed = regexp.MustCompile(`=== RUN +TestClusterKill/(\w+)(?s:.*?)(\d+) tasks acknowledged, .* failovers of (\d+): .*median (\S+), .*max (\S+)\n`)

func (m measures) parseKills(printed string) error {
	for _, k := range killed.FindAllStringSubmatch(printed, -1) {
		values := make(map[string][]float64)
		for unit, text := range map[string]string{"acknowledged": k[2], "failovers": k[3]} {
			n, err := strconv.ParseFloat(text, 64)
			if err != nil {
				return err
			}
			values[unit] = []float64{n}
		}
		for unit, text := range map[string]string{"median-ms": k[4], "max-ms": k[5]} {
			d, err := time.ParseDuration(text)
			if err != nil {
				return err
			}
			values[unit] = []float64{float64(d.Milliseconds())}
		}
		m["ClusterKill/"+k[1]] = values
	}
	return nil
}

// median is NaN if there are no values.
func (m measures) median(name, unit string) float64 {
	return median(m[name][unit])
}

// least and most are NaN if there are no values.
func (m measures) least(name, unit string) float64 {
	if len(m[name][unit]) == 0 {
		return math.NaN()
	}
	return slices.Min(m[name][unit])
}

func (m measures) most(name, unit string) float64 {
	if len(m[name][unit]) == 0 {
		return math.NaN()
	}
	return slices.Max(m[name][unit])
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	values = slices.Sorted(slices.Values(values))
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}
