// Package chart draws SVG files with gonum's plot, in black and colours on white.
package chart

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"os"
	"slices"

	"golang.org/x/text/language"
	"golang.org/x/text/message"
	"golang.org/x/text/number"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"codeq/bench/report/internal/document"
)

// Series is one line of a chart, or one bar at each label.
type Series struct {
	Name string
	X, Y []float64 // of equal length; Bars has no X. NaN in Y is a gap in the line
}

// Axes are the axes of a chart. Those of values that are not logarithmic begin at zero.
type Axes struct {
	Title, X, Y string // Lines shows Y after the title, Bars below the chart
	// LogX and LogY make an axis logarithmic, without values of zero and below.
	LogX, LogY bool
	Marks      []Mark   // of Lines
	Labels     []string // of Lines: the labels of X 0, 1 and so on; none: X are numbers
}

// Mark is a vertical line with a label at its top.
type Mark struct {
	X     float64
	Label string
}

// palette is that of Okabe and Ito, for colour-blind readers, without the yellow.
var palette = []color.Color{
	color.RGBA{0x00, 0x72, 0xb2, 0xff}, // blue
	color.RGBA{0xd5, 0x5e, 0x00, 0xff}, // vermilion
	color.RGBA{0x00, 0x9e, 0x73, 0xff}, // green
	color.RGBA{0xcc, 0x79, 0xa7, 0xff}, // purple
	color.RGBA{0xe6, 0x9f, 0x00, 0xff}, // orange
	color.RGBA{0x56, 0xb4, 0xe9, 0xff}, // sky blue
	color.RGBA{0x00, 0x00, 0x00, 0xff},
}

const (
	width      = 24 * vg.Centimeter
	lineHeight = 12 * vg.Centimeter
	barHeight  = vg.Length(14) // of one bar, in points
	// wider is a factor for the width of text in a wider font than the measured one.
	wider     = 1.2
	fewPoints = 32 // a line with at most so many points marks each, on a logarithmic axis also by a tick
)

// Lines draws an SVG file with a line for each series.
func Lines(path string, a Axes, series ...Series) error {
	p, legend := newPlot(a)
	p.Title.Text, p.X.Label.Text = a.Title+", "+a.Y, a.X
	var xs []float64
	for i, s := range series {
		if len(s.X) != len(s.Y) {
			return fmt.Errorf("chart %s: series %s has %d X and %d Y", path, s.Name, len(s.X), len(s.Y))
		}
		xs = append(xs, s.X...)
		// Dashes distinguish lines of the same colour.
		style := draw.LineStyle{Color: palette[i%len(palette)], Width: vg.Points(1.4), Dashes: plotutil.Dashes(i / len(palette))}
		legend.Add(s.Name, &plotter.Line{LineStyle: style})
		for _, part := range parts(a, s) {
			p.Add(&plotter.Line{XYs: part, LineStyle: style})
			if len(s.X) <= fewPoints || len(part) == 1 {
				p.Add(&plotter.Scatter{XYs: part, GlyphStyle: draw.GlyphStyle{Color: style.Color, Radius: vg.Points(2.4), Shape: draw.CircleGlyph{}}})
			}
		}
	}
	fit(&p.X, a.LogX, false)
	fit(&p.Y, a.LogY, true)
	slices.Sort(xs)
	if xs = slices.Compact(xs); a.LogX && len(xs) <= fewPoints {
		p.X.Tick.Marker = named(xs, tickLabel)
	} else if len(a.Labels) > 0 {
		p.X.Tick.Marker = named(xs, func(x float64) string { return a.Labels[int(x)] })
	}
	for _, m := range a.Marks {
		at := plotter.XYs{{X: m.X, Y: p.Y.Min}, {X: m.X, Y: p.Y.Max}}
		p.Add(&plotter.Line{XYs: at, LineStyle: draw.LineStyle{Color: color.Gray{0x60}, Width: vg.Points(1), Dashes: plotutil.Dashes(1)}},
			labels(p, at[1:], []string{m.Label}, draw.YTop))
	}
	return save(path, p, legend, lineHeight)
}

// Bars draws an SVG file with horizontal bars: below each other, for each label a group of one bar
// for each series, with its value written at its end.
func Bars(path string, a Axes, names []string, series ...Series) error {
	p, legend := newPlot(Axes{LogX: a.LogY})
	p.Title.Text, p.X.Label.Text = a.Title, a.Y
	ends := make([]plotter.XYs, len(series))
	for i, s := range series {
		if len(s.Y) != len(names) {
			return fmt.Errorf("chart %s: series %s has %d values for %d labels", path, s.Name, len(s.Y), len(names))
		}
		for j, v := range s.Y {
			if shown(v, a.LogY) {
				p.X.Min, p.X.Max = min(p.X.Min, v), max(p.X.Max, v)
			}
			ends[i] = append(ends[i], plotter.XY{X: v, Y: float64(len(names) - 1 - j)})
		}
	}
	fit(&p.X, a.LogY, true)
	// Room for the number at the end of the longest bar.
	if a.LogY {
		p.X.Max *= math.Pow(p.X.Max/p.X.Min, 0.1)
	} else {
		p.X.Max += 0.1 * (p.X.Max - p.X.Min)
	}
	for i, s := range series {
		if err := addBars(p, &legend, ends[i], s.Name, i, len(series)); err != nil {
			return err
		}
	}
	if len(series) == 1 && series[0].Name == "" {
		legend = plot.NewLegend()
	}
	fromBelow := slices.Clone(names)
	slices.Reverse(fromBelow)
	p.NominalY(fromBelow...)
	p.Y.Min, p.Y.Max = -0.5, float64(len(names))-0.5
	p.Y.Tick.LineStyle = draw.LineStyle{Color: color.Transparent, Width: 1}
	for _, name := range names { // invisible ticks leave room for a wider font
		p.Y.Tick.Length = max(p.Y.Tick.Length, (wider-1)*p.Y.Tick.Label.Width(name))
	}
	return save(path, p, legend, vg.Length(float64(len(names))*(float64(len(series))+0.6))*barHeight*1.15+2.6*vg.Centimeter)
}

// addBars adds the bars of the i-th of some series, and the values at their ends.
func addBars(p *plot.Plot, legend *plot.Legend, ends plotter.XYs, name string, i, series int) error {
	_, log := p.X.Scale.(plot.LogScale)
	// A bar begins at the axis, also if the axis does not begin at zero: the part below the axis is
	// invisible.
	begin, length := make(plotter.Values, len(ends)), make(plotter.Values, len(ends))
	texts := make([]string, len(ends))
	for j := range ends {
		at := len(ends) - 1 - j // bars are counted from below
		begin[at], texts[j] = p.X.Min, "none"
		if v := ends[j].X; shown(v, log) {
			length[at], texts[j] = v-p.X.Min, document.Number(v)
		} else {
			ends[j].X = p.X.Min
		}
	}
	below, err := plotter.NewBarChart(begin, barHeight)
	if err != nil {
		return err
	}
	bars, err := plotter.NewBarChart(length, barHeight)
	if err != nil {
		return err
	}
	bars.StackOn(below)
	bars.Horizontal, bars.Color, bars.LineStyle.Width = true, palette[i%len(palette)], 0
	bars.Offset = barHeight * vg.Length(float64(series-1)/2-float64(i))
	values := labels(p, ends, texts, draw.YCenter)
	values.Offset.Y = bars.Offset
	p.Add(bars, values)
	legend.Add(name, bars)
	return nil
}

// newPlot returns a plot with axes and a grid, and a separate legend.
func newPlot(a Axes) (*plot.Plot, plot.Legend) {
	p := plot.New()
	p.Title.Padding = vg.Points(8)
	for _, style := range []struct {
		*text.Style
		size font.Length
	}{
		{&p.Title.TextStyle, 14},
		{&p.Legend.TextStyle, 11},
		{&p.X.Label.TextStyle, 11},
		{&p.X.Tick.Label, 10},
		{&p.Y.Tick.Label, 10},
	} {
		style.Font.Variant, style.Font.Size = "Sans", style.size
	}
	for axis, log := range map[*plot.Axis]bool{&p.X: a.LogX, &p.Y: a.LogY} {
		axis.Padding, axis.Tick.Marker = 0, ticks{plot.DefaultTicks{}}
		if log {
			axis.Scale, axis.Tick.Marker = plot.LogScale{}, ticks{plot.LogTicks{}}
		}
	}
	legend := p.Legend
	legend.Top, legend.Left = true, true
	legend.ThumbnailWidth, legend.Padding = vg.Points(18), vg.Points(3)
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = color.Gray{0xc8}, color.Gray{0xc8}
	p.Add(grid)
	return p, legend
}

// save writes a file with the plot and the legend at its right.
func save(path string, p *plot.Plot, legend plot.Legend, height vg.Length) error {
	canvas := vgsvg.New(width, height)
	all := draw.New(canvas)
	all.SetColor(color.White)
	all.Fill(all.Rectangle.Path())
	all = draw.Crop(all, vg.Points(8), -vg.Points(8), vg.Points(8), -vg.Points(8))
	beside := vg.Length(0)
	if size := legend.Rectangle(all).Size(); size.X > 0 {
		beside = wider*size.X + vg.Points(14)
		legend.Draw(draw.Crop(all, all.Size().X-beside+vg.Points(14), 0, 0, -vg.Points(24)))
	}
	p.Draw(draw.Crop(all, 0, -beside-vg.Points(10), 0, 0))
	var svg bytes.Buffer
	if _, err := canvas.WriteTo(&svg); err != nil {
		return err
	}
	// The widths are those of Liberation Sans, which are Arial's, too.
	family := []byte("font-family:Liberation Sans")
	return os.WriteFile(path, bytes.ReplaceAll(svg.Bytes(), family, append(family, ",Arial,Helvetica,sans-serif"...)), 0o644)
}

// labels returns labels at the right of points.
func labels(p *plot.Plot, at plotter.XYs, texts []string, align text.YAlignment) *plotter.Labels {
	style := p.X.Tick.Label
	style.XAlign, style.YAlign = draw.XLeft, align
	return &plotter.Labels{XYs: at, Labels: texts, TextStyle: slices.Repeat([]text.Style{style}, len(at)), Offset: vg.Point{X: vg.Points(3)}}
}

// parts returns the lines of a series between its gaps.
func parts(a Axes, s Series) []plotter.XYs {
	var all []plotter.XYs
	var part plotter.XYs
	for i := range s.X {
		if shown(s.X[i], a.LogX) && shown(s.Y[i], a.LogY) {
			part = append(part, plotter.XY{X: s.X[i], Y: s.Y[i]})
		} else if part != nil {
			all, part = append(all, part), nil
		}
	}
	if part != nil {
		all = append(all, part)
	}
	return all
}

func shown(v float64, log bool) bool {
	return !math.IsNaN(v) && !math.IsInf(v, 0) && (!log || v > 0)
}

// fit sets the ends of an axis to those of the data; one of values begins at zero, or, if it is
// logarithmic, at a power of ten.
func fit(axis *plot.Axis, log, values bool) {
	if axis.Min > axis.Max { // there is no data
		axis.Min, axis.Max = 1, 10
	}
	switch {
	case log && values:
		axis.Min, axis.Max = math.Pow(10, math.Floor(math.Log10(axis.Min))), axis.Max*1.3
	case values:
		axis.Min, axis.Max = min(axis.Min, 0), max(axis.Max*1.05, 0)
	}
	if axis.Min == axis.Max {
		axis.Max = axis.Min + 1
	}
}

// ticks adds separators of thousands to labels, and more labels to a logarithmic axis with few.
type ticks struct{ plot.Ticker }

func (t ticks) Ticks(low, high float64) []plot.Tick {
	all := t.Ticker.Ticks(low, high)
	_, log := t.Ticker.(plot.LogTicks)
	for i := range all {
		v := all[i].Value
		digit := math.Round(v / math.Pow(10, math.Floor(math.Log10(v))))
		if !all[i].IsMinor() || log && high < 1000*low && (digit == 2 || digit == 5) {
			all[i].Label = tickLabel(v)
		}
	}
	return all
}

func named(values []float64, name func(float64) string) plot.ConstantTicks {
	var all plot.ConstantTicks
	for _, v := range values {
		all = append(all, plot.Tick{Value: v, Label: name(v)})
	}
	return all
}

func tickLabel(v float64) string {
	return message.NewPrinter(language.English).Sprint(number.Decimal(v, number.MaxFractionDigits(6)))
}
