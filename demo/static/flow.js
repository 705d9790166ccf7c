// Draws a panel's text. The value has one line of HTML per step, escaped by the server; lines that are on the page
// already stay as they are. Arrow keys walk through the steps, a tap or the pointer asks about a token.
const flow = element.querySelector('.flow');
const tip = element.querySelector('.tip');
let shown = [];
let current = -1;

function draw() {
  const value = props.value || '';
  const lines = value === '' ? [] : value.split('\n');
  let same = 0;
  while (same < shown.length && same < lines.length && shown[same] === lines[same]) same++;
  const atEnd = flow.scrollHeight - flow.scrollTop - flow.clientHeight < 40;
  while (flow.childElementCount > same) flow.lastElementChild.remove();
  if (same < lines.length) flow.insertAdjacentHTML('beforeend', lines.slice(same).join(''));
  if (same === 0) { current = -1; tip.hidden = true; }
  shown = lines;
  flow.dataset.updates = Number(flow.dataset.updates || 0) + 1;
  if (atEnd) flow.scrollTop = flow.scrollHeight;
}

function explain(step, token) {
  for (const old of flow.querySelectorAll('.here')) old.classList.remove('here');
  if (!step) { tip.hidden = true; return; }
  step.classList.add('here');
  tip.textContent = step.dataset.tip + (token ? '\n' + token.dataset.x : '');
  tip.hidden = false;
}

function ask(event) {
  const token = event.target.closest('.t');
  if (token) explain(token.closest('.st'), token);
}

flow.addEventListener('pointerover', ask);
flow.addEventListener('click', ask);
flow.addEventListener('pointerleave', () => explain(null));
flow.addEventListener('keydown', (event) => {
  const move = { ArrowRight: 1, ArrowLeft: -1, Home: -flow.childElementCount, End: flow.childElementCount }[event.key];
  if (event.key === 'Escape') explain(null);
  if (!move || !flow.childElementCount) return;
  event.preventDefault();
  current = Math.max(0, Math.min(flow.childElementCount - 1, current + move));
  const step = flow.children[current];
  step.scrollIntoView({ block: 'nearest' });
  explain(step, null);
});
watch('value', draw);
draw();
