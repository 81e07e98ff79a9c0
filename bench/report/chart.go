package report

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"os"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Series is one line of a chart, or one bar at each label.
type Series struct {
	Name string
	X, Y []float64 // equally many; Bars has no X. NaN in Y: nothing there, a line is interrupted
}

// Axes are what a chart is drawn in. Axes of values that are not logarithmic begin at zero.
type Axes struct {
	Title, X, Y string
	// LogX and LogY make an axis logarithmic; then what is not above zero is not shown.
	LogX, LogY bool
	Marks      []Mark   // of Lines
	Labels     []string // of Lines: what X 0, 1 and so on stand for; none: X are numbers
}

// Mark is a vertical line with a label at its top.
type Mark struct {
	X     float64
	Label string
}

// palette is Okabe and Ito's, which colour-blind people tell apart, without the yellow.
var palette = []color.Color{
	color.RGBA{0x00, 0x72, 0xb2, 0xff}, // blue
	color.RGBA{0xd5, 0x5e, 0x00, 0xff}, // vermilion
	color.RGBA{0x00, 0x9e, 0x73, 0xff}, // green
	color.RGBA{0xcc, 0x79, 0xa7, 0xff}, // purple
	color.RGBA{0xe6, 0x9f, 0x00, 0xff}, // orange
	color.RGBA{0x56, 0xb4, 0xe9, 0xff}, // sky blue
	color.RGBA{0x00, 0x00, 0x00, 0xff},
}

// dashes tell lines apart once the colours come round again.
var dashes = [][]vg.Length{nil, {vg.Points(6), vg.Points(3)}, {vg.Points(2), vg.Points(2)}}

var gray = color.Gray{0xc8}

const (
	width      = 24 * vg.Centimeter
	lineHeight = 12 * vg.Centimeter
	barHeight  = vg.Length(14) // of one bar, in points
	// wider is how much more room text may need where there is another font than was measured with.
	wider     = 1.2
	fewPoints = 32 // of a line of so many at most each is marked, and each is a tick of a logarithmic axis
)

// Lines draws an SVG file with a line for each series.
func Lines(path string, a Axes, series ...Series) error {
	p := newPlot(a)
	legend := p.Legend
	low, high := limits{}, limits{}
	for i, s := range series {
		if len(s.X) != len(s.Y) {
			return fmt.Errorf("chart %s: series %s has %d X and %d Y", path, s.Name, len(s.X), len(s.Y))
		}
		style := draw.LineStyle{Color: palette[i%len(palette)], Width: vg.Points(1.4), Dashes: dashes[i/len(palette)%len(dashes)]}
		key := &plotter.Line{LineStyle: style}
		legend.Add(s.Name, key)
		for _, part := range parts(a, s) {
			line := &plotter.Line{XYs: part, LineStyle: style}
			p.Add(line)
			if len(s.X) <= fewPoints || len(part) == 1 {
				p.Add(&plotter.Scatter{XYs: part, GlyphStyle: draw.GlyphStyle{Color: style.Color, Radius: vg.Points(2.4), Shape: draw.CircleGlyph{}}})
			}
			for _, xy := range part {
				low.add(xy.X)
				high.add(xy.Y)
			}
		}
	}
	for _, m := range a.Marks {
		low.add(m.X)
	}
	low.apply(&p.X, a.LogX, false)
	high.apply(&p.Y, a.LogY, true)
	if len(a.Marks) > 0 && !a.LogY {
		p.Y.Max *= 1.1 // room for the labels
	}
	if xs := distinct(series); a.LogX && len(xs) <= fewPoints {
		p.X.Tick.Marker = ticksAt(xs)
	}
	if len(a.Labels) > 0 {
		named := make(plot.ConstantTicks, len(a.Labels))
		for i, l := range a.Labels {
			named[i] = plot.Tick{Value: float64(i), Label: l}
		}
		p.X.Tick.Marker = named
	}
	for _, m := range a.Marks {
		p.Add(mark(m))
	}
	return save(path, p, legend, lineHeight)
}

// Bars draws an SVG file with horizontal bars: below each other, for each label
// a group of one bar for each series, with its value written at its end. The
// axis of the values is Axes.Y (and LogY), although it lies below; that of the
// labels is Axes.X.
func Bars(path string, a Axes, labels []string, series ...Series) error {
	a.X, a.Y, a.LogX, a.LogY = a.Y, a.X, a.LogY, false
	p := newPlot(a)
	legend := p.Legend
	values := limits{}
	group := float64(len(series)) + 0.6 // its height, in bars
	for i, s := range series {
		if len(s.Y) != len(labels) {
			return fmt.Errorf("chart %s: series %s has %d values for %d labels", path, s.Name, len(s.Y), len(labels))
		}
		b := &bars{color: palette[i%len(palette)], values: s.Y}
		for j, v := range s.Y {
			if shown(v, a.LogX) {
				values.add(v)
			}
			b.at = append(b.at, -(float64(j)*group + float64(i)))
		}
		p.Add(b)
		legend.Add(s.Name, b)
	}
	values.apply(&p.X, a.LogX, true)
	// Room for the number at the end of the longest bar.
	if a.LogX {
		p.X.Max *= math.Pow(p.X.Max/p.X.Min, 0.1)
	} else {
		p.X.Max += 0.1 * (p.X.Max - p.X.Min)
	}
	middles := make([]plot.Tick, len(labels))
	for j, l := range labels {
		middles[j] = plot.Tick{Value: -(float64(j)*group + float64(len(series)-1)/2), Label: l}
	}
	p.Y.Tick.Marker = plot.ConstantTicks(middles)
	// Invisible ticks leave room for a wider font.
	p.Y.Tick.Length, p.Y.Tick.Width = vg.Points(4), 0
	for _, l := range labels {
		p.Y.Tick.Length = max(p.Y.Tick.Length, (wider-1)*p.Y.Tick.Label.Width(l))
	}
	p.Y.Min, p.Y.Max = -(group*float64(len(labels)) - 0.6), 0.8
	if len(series) == 1 && series[0].Name == "" {
		legend = plot.NewLegend()
	}
	return save(path, p, legend, vg.Length(group*float64(len(labels)))*barHeight*1.15+2.6*vg.Centimeter)
}

// newPlot has axes, a grid and a legend that is not part of the plot.
func newPlot(a Axes) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = a.Title, a.X, a.Y
	p.Title.Padding = vg.Points(8)
	p.X.Tick.Marker, p.Y.Tick.Marker = ticks(a.LogX), ticks(a.LogY)
	if a.LogX {
		p.X.Scale = plot.LogScale{}
	}
	if a.LogY {
		p.Y.Scale = plot.LogScale{}
	}
	sans := func(f *font.Font, size vg.Length) { f.Variant, f.Size = "Sans", size }
	sans(&p.Title.TextStyle.Font, 14)
	sans(&p.Legend.TextStyle.Font, 11)
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		sans(&axis.Label.TextStyle.Font, 11)
		sans(&axis.Tick.Label.Font, 10)
		axis.Padding = 0
	}
	p.Legend.Top, p.Legend.Left = true, true
	p.Legend.ThumbnailWidth = vg.Points(18)
	p.Legend.Padding = vg.Points(3)
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = gray, gray
	p.Add(grid)
	return p
}

// save draws the plot and the legend at its right.
func save(path string, p *plot.Plot, legend plot.Legend, height vg.Length) error {
	p.Legend = plot.NewLegend()
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
	// The label of Y stands beside the plot, too: plot.Draw would make room for
	// it at the linear middle of the axis even if that is logarithmic.
	label := p.Y.Label
	p.Y.Label.Text = ""
	left := vg.Length(0)
	if label.Text != "" {
		label.TextStyle.Rotation += math.Pi / 2
		label.TextStyle.XAlign, label.TextStyle.YAlign = draw.XCenter, draw.YTop
		all.FillText(label.TextStyle, vg.Point{X: all.Min.X, Y: all.Center().Y}, label.Text)
		left = label.TextStyle.FontExtents().Height + vg.Points(4)
	}
	p.Draw(draw.Crop(all, left, -beside-vg.Points(10), 0, 0))
	var text bytes.Buffer
	if _, err := canvas.WriteTo(&text); err != nil {
		return err
	}
	// The widths are those of Liberation Sans, which are Arial's, too.
	family := []byte("font-family:Liberation Sans")
	svg := bytes.ReplaceAll(text.Bytes(), family, append(family, ",Arial,Helvetica,sans-serif"...))
	return os.WriteFile(path, svg, 0o644)
}

// parts are what is shown of a series, without gaps.
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

func distinct(series []Series) []float64 {
	var xs []float64
	for _, s := range series {
		xs = append(xs, s.X...)
	}
	slices.Sort(xs)
	return slices.Compact(xs)
}

// limits are of the values of an axis.
type limits struct {
	min, max float64
	any      bool
}

func (l *limits) add(v float64) {
	if !l.any {
		l.min, l.max, l.any = v, v, true
	}
	l.min, l.max = min(l.min, v), max(l.max, v)
}

// apply sets the ends of the axis; of one of values so that it begins at zero,
// and a logarithmic one at a round number.
func (l limits) apply(axis *plot.Axis, log, values bool) {
	if !l.any {
		l.min, l.max = 1, 10
	}
	switch {
	case log && values:
		l.min, l.max = math.Pow(10, math.Floor(math.Log10(l.min))), l.max*1.3
	case values:
		l.min, l.max = min(l.min, 0), max(l.max*1.05, 0)
	}
	if l.min == l.max {
		l.max = l.min + 1
	}
	axis.Min, axis.Max = l.min, l.max
}

// ticks has numbers at round values.
func ticks(log bool) plot.Ticker {
	return plot.TickerFunc(func(low, high float64) []plot.Tick {
		if log {
			return logTicks(low, high)
		}
		return linearTicks(low, high)
	})
}

// linearTicks are five to eleven multiples of 1, 2 or 5 times a power of ten.
func linearTicks(low, high float64) []plot.Tick {
	step := math.Pow(10, math.Floor(math.Log10((high-low)/5)))
	for _, n := range []float64{5, 2} {
		if (high-low)/(n*step) >= 5 {
			step *= n
			break
		}
	}
	var all []plot.Tick
	// Adding 0 makes 0 of -0.
	for n := math.Ceil(low/step-1e-9) + 0; n*step <= high+1e-9*step; n++ {
		all = append(all, plot.Tick{Value: n * step, Label: tickLabel(n * step)})
	}
	return all
}

// logTicks are 1, 2 and 5 times the powers of ten, or the powers alone if there are many.
func logTicks(low, high float64) []plot.Tick {
	var all []plot.Tick
	first, last := math.Floor(math.Log10(low)), math.Ceil(math.Log10(high))
	for e := first; e <= last; e++ {
		for n := 1.0; n < 10; n++ {
			t := plot.Tick{Value: n * math.Pow(10, e)}
			if n == 1 || (n == 2 || n == 5) && last-first <= 5 {
				t.Label = tickLabel(t.Value)
			}
			if t.Value >= low*0.999 && t.Value <= high*1.001 {
				all = append(all, t)
			}
		}
	}
	return all
}

func ticksAt(values []float64) plot.ConstantTicks {
	all := make(plot.ConstantTicks, len(values))
	for i, v := range values {
		all[i] = plot.Tick{Value: v, Label: tickLabel(v)}
	}
	return all
}

// tickLabel is v without digits that come from its representation only.
func tickLabel(v float64) string {
	return thousands(fmt.Sprintf("%.*f", decimals(v), v))
}

// decimals is how many v has, four significant digits at the most below one.
func decimals(v float64) int {
	for n := range 12 {
		scaled := v * math.Pow(10, float64(n))
		if math.Abs(scaled-math.Round(scaled)) <= 1e-6*max(math.Abs(scaled), 1e-3) {
			return n
		}
	}
	return 12
}

// mark draws itself over the whole height.
type mark Mark

func (m mark) Plot(c draw.Canvas, p *plot.Plot) {
	x, _ := p.Transforms(&c)
	at := x(m.X)
	c.StrokeLine2(draw.LineStyle{Color: color.Gray{0x60}, Width: vg.Points(1), Dashes: dashes[1]}, at, c.Min.Y, at, c.Max.Y)
	style := p.X.Tick.Label
	style.XAlign, style.YAlign = draw.XLeft, draw.YTop
	style.Rotation = 0
	c.FillText(style, vg.Point{X: at + vg.Points(3), Y: c.Max.Y - vg.Points(2)}, m.Label)
}

// bars are those of one series.
type bars struct {
	color  color.Color
	at     []float64 // middles
	values []float64
}

func (b *bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	style := p.X.Tick.Label
	style.XAlign, style.YAlign = draw.XLeft, draw.YCenter
	_, log := p.X.Scale.(plot.LogScale)
	for i, v := range b.values {
		end, text := c.Min.X, "none"
		if shown(v, log) {
			end, text = x(v), Number(v)
			low, high := y(b.at[i]-0.44), y(b.at[i]+0.44)
			c.FillPolygon(b.color, []vg.Point{{X: x(p.X.Min), Y: low}, {X: end, Y: low}, {X: end, Y: high}, {X: x(p.X.Min), Y: high}})
		}
		c.FillText(style, vg.Point{X: end + vg.Points(3), Y: y(b.at[i])}, text)
	}
}

// Thumbnail is the key in the legend.
func (b *bars) Thumbnail(c *draw.Canvas) {
	c.FillPolygon(b.color, []vg.Point{{X: c.Min.X, Y: c.Min.Y}, {X: c.Max.X, Y: c.Min.Y}, {X: c.Max.X, Y: c.Max.Y}, {X: c.Min.X, Y: c.Max.Y}})
}
